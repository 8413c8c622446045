"""Broadcasting variables and reducing tensors, of TensorFlow and of Keras."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd
from hvdsync.errors import RankMismatch
from tests.parallel.tensorflow.helpers import assert_equal_on_all_ranks, values

DTYPES = [
    *("float16", "bfloat16", "float32", "float64", "complex64"),
    *("int8", "uint8", "int32", "uint32", "int64", "bool"),
]


def test_variables_of_any_dtype_and_equal_names_get_the_roots_values():
    root = hvd.size() - 1
    variables = [
        tf.Variable(tf.cast(tf.fill([2, i + 1], hvd.rank() + 1), d), name="same")
        for i, d in enumerate(DTYPES)
    ]
    hvd.broadcast_variables(variables, root_rank=root)
    for variable, dtype in zip(variables, DTYPES, strict=True):
        assert variable.dtype.name == dtype
        expected = tf.cast(tf.fill(variable.shape, root + 1), dtype)
        assert np.array_equal(variable.numpy(), expected.numpy())


def test_values_arrive_bit_by_bit():
    v = tf.Variable([np.nan, -0.0, 1e-45, np.inf] if hvd.rank() == 0 else [1.0, 2.0, 3.0, 4.0])
    hvd.broadcast_variables([v], 0)
    assert v.numpy().tobytes() == np.array([np.nan, -0.0, 1e-45, np.inf], "float32").tobytes()


@pytest.mark.parametrize("inplace", [False, True])
def test_keras_models_and_their_optimizers_become_the_roots(inplace):
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()]
    )
    optimizer = keras.optimizers.Adam(0.1 * (hvd.rank() + 1))
    optimizer.build(model.trainable_variables)
    before = hvd.allgather_object(values(model.variables + optimizer.variables))[0]
    hvd.broadcast_variables(model.variables + optimizer.variables, 0, inplace=inplace)
    assert_equal_on_all_ranks(model.variables + optimizer.variables)
    for found, expected in zip(values(model.variables + optimizer.variables), before, strict=True):
        assert found.tobytes() == expected.tobytes()
    assert float(optimizer.learning_rate) == pytest.approx(0.1)


def test_variables_are_broadcast_inside_a_function():
    v, k = tf.Variable([hvd.rank() + 1.0]), keras.Variable([hvd.rank() + 10.0])

    @tf.function
    def first_step():
        hvd.broadcast_variables([v, k], root_rank=0)
        return v * 2.0, k * 2.0

    twice_v, twice_k = first_step()
    assert (float(twice_v[0]), float(twice_k[0])) == (2.0, 20.0)
    assert (float(v[0]), float(k.value[0])) == (1.0, 10.0)


@pytest.mark.usefixtures("several_ranks")
def test_different_models_are_refused_on_every_rank_with_both_shapes():
    v = keras.Variable(np.zeros((2, 3 + (hvd.rank() == 1))), name="kernel")
    with pytest.raises(RankMismatch, match=r"rank 0: kernel \(2, 3\).*rank 1: kernel \(2, 4\)"):
        hvd.broadcast_variables([v], 0)
    counts = [tf.Variable(1.0)] * (1 + (hvd.rank() == 0))
    with pytest.raises(RankMismatch, match="number of variables.*rank 0: 2; rank 1: 1"):
        hvd.broadcast_variables(counts, 0)


@pytest.mark.parametrize("make", [tf.constant, tf.Variable, keras.Variable])
def test_collectives_take_tensors_and_both_kinds_of_variables(make):
    ranks, value = hvd.size(), make([hvd.rank() + 1.0, 0.0])
    total = ranks * (ranks + 1) / 2
    assert hvd.allreduce(value, op=hvd.Sum).numpy().tolist() == [total, 0.0]
    assert hvd.allreduce(value).numpy().tolist() == [total / ranks, 0.0]
    assert hvd.allreduce(value, op=hvd.Max).numpy().tolist() == [ranks, 0.0]
    assert hvd.broadcast(value, ranks - 1).numpy().tolist() == [ranks, 0.0]
    expected = [x for r in range(ranks) for x in (r + 1.0, 0.0)]
    assert hvd.allgather(value).numpy().tolist() == expected
    reduced = hvd.grouped_allreduce([value, value], op=hvd.Sum)
    assert [r.numpy().tolist() for r in reduced] == [[total, 0.0]] * 2


def test_a_mixed_group_keeps_each_gradients_own_shape():
    """Sparse and dense in one call: the sparse one comes back with its own dense shape."""
    sparse = tf.IndexedSlices(
        tf.ones([1, 3]), tf.constant([hvd.rank()]), dense_shape=tf.constant([8, 3])
    )
    dense, again = hvd.grouped_allreduce([tf.ones([5]), sparse], op=hvd.Sum)
    assert dense.numpy().tolist() == [float(hvd.size())] * 5
    assert again.dense_shape.numpy().tolist() == [8, 3]
    assert again.indices.numpy().tolist() == list(range(hvd.size()))


def test_bfloat16_is_reduced_though_horovod_does_not_know_it():
    reduced = hvd.allreduce(tf.constant([hvd.rank() + 1.0], tf.bfloat16), op=hvd.Sum)
    assert reduced.dtype == tf.bfloat16
    assert float(reduced[0]) == sum(range(1, hvd.size() + 1))


def test_objects_travel_with_horovods_arguments():
    got = hvd.broadcast_object({"from": hvd.rank()}, root_rank=0, session=None, name="config")
    assert got == {"from": 0}
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


def test_each_element_of_a_sharded_data_set_is_read_by_one_rank():
    read = [int(x) for x in hvd.shard(tf.data.Dataset.range(10), uneven="exact")]
    assert read == list(range(hvd.rank(), 10, hvd.size()))
    everyone = hvd.allgather_object(read)
    assert sorted(x for part in everyone for x in part) == list(range(10))


def test_padded_shards_are_equally_long():
    lengths = hvd.allgather_object(len(list(hvd.shard(tf.data.Dataset.range(9)))))
    assert lengths == [-(-9 // hvd.size())] * hvd.size()
