"""TensorFlow in one process without a launcher and without ``init``."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
pytest.importorskip("horovod.tensorflow")
import keras  # noqa: E402

import hvdsync.tensorflow as hvd  # noqa: E402
from hvdsync.errors import DataError  # noqa: E402


def train(optimizer, wrap):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - y))
        gradients = wrap(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    for _ in range(4):
        step(x, x.sum(1, keepdims=True))
    operations = {op.type for op in step.get_concrete_function(x, x[:, :1]).graph.get_operations()}
    return [v.numpy().tobytes() for v in model.variables + optimizer.variables], operations


def test_a_wrapped_tape_is_bit_identical_and_adds_no_operation():
    plain, plain_operations = train(keras.optimizers.Adam(0.01), lambda tape: tape)
    wrapped, operations = train(keras.optimizers.Adam(0.01), hvd.DistributedGradientTape)
    assert wrapped == plain
    assert operations == plain_operations


def test_collectives_give_back_what_they_are_given():
    value = tf.constant([[1.0, 2.0]])
    assert hvd.allreduce(value, op=hvd.Sum).numpy().tolist() == [[1.0, 2.0]]
    assert hvd.allreduce(value, prescale_factor=2.0).numpy().tolist() == [[2.0, 4.0]]
    assert hvd.allgather(value).numpy().tolist() == [[1.0, 2.0]]
    assert hvd.broadcast(keras.Variable([3.0]), 0).numpy().tolist() == [3.0]
    assert hvd.alltoall(value, splits=[1])[1].numpy().tolist() == [1]
    assert [t.numpy().tolist() for t in hvd.grouped_allreduce([value])] == [[[1.0, 2.0]]]
    assert hvd.reducescatter(value).numpy().tolist() == [[1.0, 2.0]]
    assert int(hvd.join()) == 0
    hvd.broadcast_variables([tf.Variable(1.0)], root_rank=0)
    assert hvd.broadcast_object("x") == "x" and hvd.allgather_object("x") == ["x"]
    assert (hvd.rank(), hvd.size(), hvd.cross_rank(), hvd.cross_size()) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("uneven", "expected"),
    [
        ("pad", [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]),
        ("drop", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("exact", [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]),
    ],
)
@pytest.mark.parametrize("known", [True, False], ids=["known-length", "unknown-length"])
def test_uneven_data_sets_are_sharded_by_the_policy(uneven, expected, known):
    dataset = tf.data.Dataset.range(10)
    if not known:
        dataset = dataset.filter(lambda x: x >= 0)
    parts = [hvd.shard(dataset, uneven, rank=r, size=4) for r in range(4)]
    assert [[int(x) for x in part] for part in parts] == expected


def test_endless_short_and_empty_data_sets():
    endless = hvd.shard(tf.data.Dataset.range(3).repeat(), rank=1, size=2)
    assert [int(x) for x in endless.take(4)] == [1, 0, 2, 1]
    short = [int(x) for x in hvd.shard(tf.data.Dataset.range(1), rank=3, size=4)]
    assert short == [0]
    with pytest.raises(DataError, match="0 elements"):
        hvd.shard(tf.data.Dataset.range(0), rank=0, size=2)
    with pytest.raises(DataError, match="uneven is 'other'"):
        hvd.shard(tf.data.Dataset.range(4), "other", rank=0, size=2)


def test_compression_halves_what_is_floating_and_leaves_the_rest():
    wire, ctx = hvd.Compression.fp16.compress(tf.constant([1.5, 2.0]))
    assert wire.dtype == tf.float16
    assert hvd.Compression.fp16.decompress(wire, ctx).dtype == tf.float32
    wire, ctx = hvd.Compression.fp16.compress(tf.constant([1, 2]))
    assert wire.dtype == tf.int32 and hvd.Compression.fp16.decompress(wire, ctx) is wire


def test_options_that_do_not_go_together_are_refused():
    tape, sgd = tf.GradientTape(), keras.optimizers.SGD(0.1)
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        hvd.DistributedGradientTape(tape, op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="groups is 0"):
        hvd.DistributedGradientTape(tape, groups=0)
    with pytest.raises(ValueError, match="backward_passes_per_step is 0"):
        hvd.DistributedOptimizer(sgd, backward_passes_per_step=0)
    with pytest.raises(ValueError, match="engine is 'ddp'"):
        hvd.distribute([tf.Variable(1.0)], sgd, engine="ddp")
    with pytest.raises(ValueError, match=r"expected a keras\.optimizers\.Optimizer"):
        hvd.DistributedOptimizer("sgd")


def test_a_synchronised_layer_saves_as_the_plain_one(tmp_path):
    model = keras.Sequential([keras.Input((3,)), hvd.SyncBatchNormalization(momentum=0.5)])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[0]) is keras.layers.BatchNormalization
    assert loaded.layers[0].momentum == 0.5
    with pytest.raises(ValueError, match="fused=True"):
        hvd.SyncBatchNormalization(fused=True)
