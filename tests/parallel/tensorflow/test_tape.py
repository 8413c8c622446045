"""``DistributedGradientTape``: whose gradients, in which form, under which names."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd
from hvdsync.errors import HvdsyncError
from tests.parallel.cases import matrix_but
from tests.parallel.ranks import shard
from tests.parallel.tensorflow.helpers import (
    CLOSE,
    assert_equal_on_all_ranks,
    batches,
    loss_of,
    make_model,
    train_plain,
    values,
)


def mean_over_ranks(value_of_rank):
    return float(np.mean([value_of_rank(r) for r in range(hvd.size())]))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("make", [tf.Variable, keras.Variable], ids=["tf", "keras"])
def test_gradients_are_averaged_over_ranks(make, compiled):
    v = make(2.0)

    def step():
        with tf.GradientTape() as tape:
            y = v * float(hvd.rank() + 1)
        return hvd.DistributedGradientTape(tape).gradient(y, [v])

    (gradient,) = (tf.function(step) if compiled else step)()
    assert float(gradient) == mean_over_ranks(lambda r: r + 1)


@pytest.mark.parametrize("wrap_first", [True, False])
def test_the_wrapped_tape_is_entered_or_wrapped_after_recording(wrap_first):
    v = tf.Variable(3.0)
    if wrap_first:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            y = v * v
    else:
        with tf.GradientTape() as plain:
            y = v * v
        tape = hvd.DistributedGradientTape(plain)
    assert float(tape.gradient(y, v)) == 6.0
    assert [w.ref() for w in tape.watched_variables()] == [v.ref()]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_gradients_keep_none_and_the_structure_of_their_sources(compiled):
    used, unused, watched = tf.Variable(1.0), tf.Variable(1.0), tf.constant([1.0, 2.0])

    def step():
        with tf.GradientTape() as tape:
            tape.watch(watched)
            y = used * (hvd.rank() + 1.0) + tf.reduce_sum(watched * (hvd.rank() + 1.0))
        wrapped = hvd.DistributedGradientTape(tape)
        return wrapped.gradient(y, {"a": [used, unused], "b": (watched,)})

    gradients = (tf.function(step) if compiled else step)()
    mean = mean_over_ranks(lambda r: r + 1)
    assert float(gradients["a"][0]) == mean
    assert gradients["a"][1] is None
    assert gradients["b"][0].numpy().tolist() == [mean, mean]


def test_unconnected_gradients_and_output_gradients_are_forwarded():
    used, unused = tf.Variable([1.0, 1.0]), tf.Variable([1.0])
    with tf.GradientTape() as tape:
        y = used * (hvd.rank() + 1.0)
    gradients = hvd.DistributedGradientTape(tape).gradient(
        y,
        [used, unused],
        output_gradients=tf.constant([1.0, 10.0]),
        unconnected_gradients=tf.UnconnectedGradients.ZERO,
    )
    mean = mean_over_ranks(lambda r: r + 1)
    assert gradients[0].numpy().tolist() == [mean, 10 * mean]
    assert gradients[1].numpy().tolist() == [0.0]


def test_a_persistent_tape_gives_several_gradients_in_one_function():
    v, w = tf.Variable(2.0), tf.Variable(5.0)

    @tf.function
    def step():
        with tf.GradientTape(persistent=True) as tape:
            y = v * w * (hvd.rank() + 1.0)
            z = v * v * (hvd.rank() + 1.0)
        wrapped = hvd.DistributedGradientTape(tape)
        return wrapped.gradient(y, [v, w]), wrapped.gradient(z, [v])

    (to_v, to_w), (square,) = step()
    mean = mean_over_ranks(lambda r: r + 1)
    assert [float(to_v), float(to_w), float(square)] == [5 * mean, 2 * mean, 4 * mean]


def test_jacobians_stay_those_of_the_rank():
    v = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = v * float(hvd.rank() + 1)
    jacobian = hvd.DistributedGradientTape(tape).jacobian(y, v).numpy()
    assert jacobian.tolist() == (np.eye(2) * (hvd.rank() + 1)).tolist()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("dense", [False, True], ids=["gathered", "as-dense"])
def test_sparse_gradients_are_those_of_all_ranks(dense, compiled):
    """Ranks look up different numbers of rows, some of them twice."""
    table = tf.Variable(tf.ones([6, 2]))
    rows = [[0, 1], [1, 1, 5], [2], [0, 3]]
    expected = np.zeros((6, 2))
    for rank in range(hvd.size()):
        for row in rows[rank]:
            expected[row] += (rank + 1) / hvd.size()

    def step():
        with tf.GradientTape() as tape:
            looked_up = tf.nn.embedding_lookup(table, rows[hvd.rank()])
            y = tf.reduce_sum(looked_up) * (hvd.rank() + 1.0)
        wrapped = hvd.DistributedGradientTape(tape, sparse_as_dense=dense)
        return wrapped.gradient(y, [table])[0]

    gradient = (tf.function(step) if compiled else step)()
    assert isinstance(gradient, tf.IndexedSlices) == (not dense or hvd.size() == 1)
    np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, rtol=1e-6)


def test_sum_and_predivide_and_half_precision():
    v = tf.Variable([1.0, 2.0])

    def gradient(**options):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(v * (hvd.rank() + 1.0))
        return hvd.DistributedGradientTape(tape, **options).gradient(y, v).numpy().tolist()

    ranks, mean = hvd.size(), mean_over_ranks(lambda r: r + 1)
    assert gradient(op=hvd.Sum) == [mean * ranks] * 2
    assert gradient(gradient_predivide_factor=4.0) == [mean] * 2
    assert gradient(compression=hvd.Compression.fp16) == [mean] * 2
    with pytest.raises(ValueError, match="gradient_predivide_factor"):
        gradient(op=hvd.Sum, gradient_predivide_factor=4.0)


@pytest.mark.parametrize("groups", [1, 2, "lists"])
def test_groups_change_what_travels_together_and_not_the_result(groups):
    vs = [tf.Variable(float(i)) for i in range(5)]
    groups = [[vs[0], vs[4]], [vs[1]]] if groups == "lists" else groups
    with tf.GradientTape() as tape:
        y = tf.add_n([v * (i + 1.0) * (hvd.rank() + 1.0) for i, v in enumerate(vs)])
    gradients = hvd.DistributedGradientTape(tape, groups=groups).gradient(y, vs)
    mean = mean_over_ranks(lambda r: r + 1)
    np.testing.assert_allclose(gradients, [(i + 1) * mean for i in range(5)])


def test_mixed_dtypes_and_large_gradients_come_back_in_place():
    vs = [
        tf.Variable(tf.ones([300, 2000])),  # more than one bucket
        tf.Variable(tf.ones([3], tf.float64)),
        tf.Variable(tf.ones([700, 1000])),
        tf.Variable(tf.ones([2, 2], tf.float16)),
        tf.Variable(tf.ones([5], tf.bfloat16)),
    ]
    with tf.GradientTape() as tape:
        y = tf.add_n(
            [
                tf.cast(tf.reduce_sum(v * tf.cast((i + 1) * (hvd.rank() + 1), v.dtype)), tf.float32)
                for i, v in enumerate(vs)
            ]
        )
    gradients = hvd.DistributedGradientTape(tape).gradient(y, vs)
    mean = mean_over_ranks(lambda r: r + 1)
    for i, (v, g) in enumerate(zip(vs, gradients, strict=True)):
        assert (g.dtype, g.shape) == (v.dtype, v.shape)
        assert np.unique(tf.cast(g, tf.float32)).tolist() == [(i + 1) * mean]


def test_two_networks_with_equal_names_in_one_step_do_not_meet():
    """A generator and a discriminator; both reductions may be in flight at once."""
    first = [tf.Variable(1.0, name="w"), tf.Variable(1.0, name="w")]
    second = [tf.Variable([1.0, 1.0], name="w"), tf.Variable(1.0, name="w")]

    @tf.function
    def step():
        results = []
        for scale, vs in ((1.0, first), (100.0, second)):
            with tf.GradientTape() as tape:
                y = tf.add_n([tf.reduce_sum(v) * scale * (hvd.rank() + 1.0) for v in vs])
            results.append(hvd.DistributedGradientTape(tape).gradient(y, vs))
        return results

    mean = mean_over_ranks(lambda r: r + 1)
    for _ in range(20):
        (a, b), (c, d) = step()
        assert (float(a), float(b), float(d)) == (mean, mean, 100 * mean)
        assert c.numpy().tolist() == [100 * mean] * 2


@pytest.mark.usefixtures("several_ranks")
def test_retracing_on_one_rank_alone_changes_no_name():
    """Rank 0 sees batches of another size each time; only there the function is traced again."""
    v = tf.Variable(1.0)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_mean(x * v)
        return hvd.DistributedGradientTape(tape).gradient(y, v)

    for i in range(4):
        x = tf.fill([i + 2 if hvd.rank() == 0 else 3], float(hvd.rank() + i))
        assert float(step(x)) == mean_over_ranks(lambda r, i=i: r + i)


def test_local_sources_keep_their_own_gradient():
    layer, shared = keras.layers.Dense(1, use_bias=False), tf.Variable(1.0)
    layer.build((None, 1))
    (weight,) = layer.trainable_weights

    def gradients(**options):
        with tf.GradientTape() as tape:
            x = tf.constant([[hvd.rank() + 1.0]])
            y = tf.reduce_sum(layer(x)) + shared * (hvd.rank() + 1.0)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, **options)
        return tape.gradient(y, [weight, shared])

    mean = mean_over_ranks(lambda r: r + 1)
    local, reduced = gradients()
    assert float(local[0, 0]) == (hvd.rank() + 1) / hvd.size() and float(reduced) == mean
    local, reduced = gradients(scale_local_gradients=False)
    assert float(local[0, 0]) == hvd.rank() + 1 and float(reduced) == mean


@pytest.mark.parametrize("name", matrix_but(["SGD"], ["SGD", "Adam", "AdamW"]))
def test_a_custom_loop_equals_one_process_on_whole_batches(name):
    arguments = {"SGD": {"momentum": 0.9, "weight_decay": 1e-2}}.get(name, {})
    data = list(batches(20))
    reference, model = make_model(), make_model()
    train_plain(reference, getattr(keras.optimizers, name)(0.02, **arguments), data)
    optimizer = getattr(keras.optimizers, name)(0.02, **arguments)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for x, y in data:
        step(*shard(tf.constant(x), tf.constant(y)))
    assert_equal_on_all_ranks(model.variables + optimizer.variables)
    for found, expected in zip(values(model.variables), values(reference.variables), strict=True):
        np.testing.assert_allclose(found, expected, **CLOSE)


def test_unequal_shards_weigh_by_samples():
    """Rank 0 has 3 samples of x=1, the others 1 of x=5; the mean over all samples counts."""
    count, x = (3, 1.0) if hvd.rank() == 0 else (1, 5.0)
    v = tf.Variable(0.0)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.fill([count], x) * v) * hvd.loss_scale(count)
    gradient = hvd.DistributedGradientTape(tape).gradient(loss, v)
    others = hvd.size() - 1
    assert float(gradient) == pytest.approx((3 + 5 * others) / (3 + others), rel=1e-6)


def test_waiting_is_counted_and_only_where_there_is_somebody_to_wait_for():
    v = tf.Variable(1.0)
    with tf.GradientTape() as tape:
        y = v * 1.0
    tape = hvd.DistributedGradientTape(tape, name="counted")
    tape.gradient(y, v)
    assert (tape.waited_seconds > 0) == (hvd.size() > 1)


@pytest.mark.usefixtures("several_ranks")
def test_a_reduction_inside_a_compiled_function_says_what_to_do():
    v = tf.Variable(1.0)

    @tf.function(jit_compile=True)
    def step():
        with tf.GradientTape() as tape:
            y = v * 2.0
        return hvd.DistributedGradientTape(tape).gradient(y, v)

    with pytest.raises(HvdsyncError, match="jit_compile"):
        step()


def test_what_is_local_may_be_compiled():
    v = tf.Variable(3.0)

    @tf.function(jit_compile=True)
    def local():
        with tf.GradientTape() as tape:
            y = v * v * (hvd.rank() + 1.0)
        return tape.gradient(y, v)

    reduced = hvd.allreduce(local(), op=hvd.Average)
    assert float(reduced) == 6 * mean_over_ranks(lambda r: r + 1)


def test_collectives_of_constants_run_at_every_call_of_a_function():
    """Left alone, TensorFlow evaluates them once while it optimises the graph."""

    @tf.function
    def total(x):
        mine = tf.constant([1.0]) if hvd.rank() == 0 else x
        part = tf.constant([2]) if hvd.rank() == 0 else tf.cast(x, tf.int32)
        gathered = hvd.allgather(part, name="gathered")
        return hvd.allreduce(mine, op=hvd.Sum, name="sum"), gathered

    for x in (3.0, 5.0, 7.0):
        summed, gathered = total(tf.constant([x]))
        others = hvd.size() - 1
        assert float(summed[0]) == 1.0 + x * others
        assert gathered.numpy().tolist() == [2] + [int(x)] * others
