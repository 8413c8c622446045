"""``distribute`` and ``DistributedOptimizer`` around Keras optimizers in TensorFlow loops."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd
from hvdsync.errors import HvdsyncError, RankMismatch
from tests.parallel.cases import matrix_but
from tests.parallel.keras_nets import FEATURES
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

OPTIMIZERS = {
    **FEATURES,
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=0.01),
}


def step_function(model, optimizer):
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return step


def train(model, optimizer, data):
    step = step_function(model, optimizer)
    for x, y in data:
        step(tf.constant(x), tf.constant(y))


# The others are no more than Keras's own, and run in its suite.
@pytest.mark.parametrize(
    "kind", matrix_but(["adam", "global_clipnorm", "ema", "loss_scale", "clipvalue"], OPTIMIZERS)
)
def test_ranks_together_equal_one_process_on_whole_batches(kind):
    data = list(batches(13))
    reference, plain = make_model(), OPTIMIZERS[kind]()
    train(reference, plain, data)
    model, optimizer = hvd.distribute(make_model(), OPTIMIZERS[kind]())
    train(model, optimizer, [shard(*batch) for batch in data])
    assert_equal_on_all_ranks(model.variables + optimizer.variables)
    for found, expected in zip(values(model.variables), values(reference.variables), strict=True):
        np.testing.assert_allclose(found, expected, **CLOSE)
    assert int(optimizer.iterations) == int(plain.iterations)


def test_models_that_start_differently_end_alike():
    model = make_model()
    for v in model.variables:
        v.assign(v + float(hvd.rank()))
    model, optimizer = hvd.distribute(model, keras.optimizers.Adam(0.1 * (hvd.rank() + 1)))
    assert_equal_on_all_ranks(model.variables + optimizer.variables)
    assert values(model.variables)[0].tobytes() == values(make_model().variables)[0].tobytes()
    train(model, optimizer, [shard(*batch) for batch in batches(3)])
    assert_equal_on_all_ranks(model.variables + optimizer.variables)


def test_the_wrapped_optimizer_is_the_given_one():
    model, plain = make_model(), keras.optimizers.SGD(0.1, momentum=0.9)
    plain.build(model.trainable_variables)
    plain.momentums[0].assign(tf.ones_like(plain.momentums[0]))
    wrapped = hvd.DistributedOptimizer(plain)
    assert isinstance(wrapped, keras.optimizers.SGD)
    assert wrapped.momentums[0] is plain.momentums[0]
    plain.learning_rate = 0.5
    assert float(wrapped.learning_rate) == 0.5
    wrapped.learning_rate = 0.25
    assert float(plain.learning_rate) == 0.25
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(wrapped)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "function"])
def test_backward_passes_are_summed_before_they_are_reduced(average, compiled):
    v = tf.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0),
        backward_passes_per_step=2,
        average_aggregated_gradients=average,
    )

    def apply(gradient):
        optimizer.apply_gradients([(gradient, v)])

    apply = tf.function(apply) if compiled else apply
    ranks, expected = hvd.size(), 0.0
    for i in range(3):
        apply(tf.constant(hvd.rank() + 1.0))
        assert float(v) == pytest.approx(expected)
        apply(tf.constant(10.0 + i))
        expected -= ((ranks + 1) / 2 + 10 + i) / (2 if average else 1)
        assert float(v) == pytest.approx(expected)


def test_infinite_gradients_of_one_rank_skip_the_step_on_all():
    v = tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=8.0)
    )
    apply = tf.function(lambda g: optimizer.apply([g], [v]) or 0)
    last = hvd.rank() == hvd.size() - 1
    apply(tf.constant(np.inf if last else 8.0))
    assert float(v) == 1.0 and float(optimizer.dynamic_scale) == 4.0
    apply(tf.constant(4.0))
    assert float(v) == 0.0 and float(optimizer.dynamic_scale) == 4.0
    assert int(optimizer.iterations) == 1


def test_the_global_float16_policy_brings_a_loss_scale_that_all_ranks_share():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = make_model()
        model, optimizer = hvd.distribute(model, keras.optimizers.SGD(0.05))
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        train(model, optimizer, [shard(*batch) for batch in batches(5)])
        assert_equal_on_all_ranks(model.variables + optimizer.variables)
    finally:
        keras.mixed_precision.set_global_policy("float32")


def test_embeddings_with_sparse_gradients_equal_one_process():
    rng = np.random.default_rng(0)
    data = [(rng.integers(0, 9, (12, 2)), rng.normal(size=(12, 1))) for _ in range(6)]
    data = [(x.astype("int32"), y.astype("float32")) for x, y in data]

    def make():
        model = keras.Sequential(
            [
                keras.Input((2,), dtype="int32"),
                keras.layers.Embedding(9, 3),
                keras.layers.Flatten(),
                keras.layers.Dense(1),
            ]
        )
        for i, v in enumerate(model.variables):
            v.assign(np.linspace(-1, 1, int(np.prod(v.shape))).reshape(v.shape) / (i + 1))
        return model

    for kind in ("momentum", "adam"):
        reference = make()
        train_plain(reference, OPTIMIZERS[kind](), data)
        model, optimizer = hvd.distribute(make(), OPTIMIZERS[kind]())
        train(model, optimizer, [shard(*batch) for batch in data])
        assert_equal_on_all_ranks(model.variables)
        for a, b in zip(values(model.variables), values(reference.variables), strict=True):
            np.testing.assert_allclose(a, b, **CLOSE)


def test_gradients_that_are_none_are_left_out():
    a, b = tf.Variable(1.0), tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([tf.constant(hvd.rank() + 1.0), None], [a, b])
    assert float(a) == 1.0 - (hvd.size() + 1) / 2
    assert float(b) == 1.0


def test_frozen_layers_may_be_unfrozen_between_compiled_steps():
    model = make_model()
    model.layers[0].trainable = False
    model, optimizer = hvd.distribute(model, keras.optimizers.SGD(0.1))
    data = [shard(*batch) for batch in batches(4)]
    train(model, optimizer, data[:2])
    model.layers[0].trainable = True
    frozen = values(model.layers[0].variables)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    train(model, optimizer, data[2:])
    assert_equal_on_all_ranks(model.variables)
    assert not np.array_equal(frozen[0], values(model.layers[0].variables)[0])


@pytest.mark.usefixtures("several_ranks")
def test_distribute_refuses_models_that_differ_and_models_that_are_not_built():
    model = make_model(features=5 + (hvd.rank() == 1))
    with pytest.raises(RankMismatch, match=r"\(5, 7\).*\(6, 7\)"):
        hvd.distribute(model, keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="no variables yet"):
        hvd.distribute(keras.Sequential([keras.layers.Dense(1)]), keras.optimizers.SGD(0.1))


def test_batch_statistics_are_those_of_all_ranks_samples():
    """Unequal batches; mean, variance and gradients as one process has them on all samples."""
    rng = np.random.default_rng(0)
    everything = rng.normal(3.0, 2.0, size=(3 * hvd.size() + 1, 4)).astype("float32")
    weights = rng.normal(size=everything.shape).astype("float32")
    start = 3 * hvd.rank()
    stop = start + 3 if hvd.rank() < hvd.size() - 1 else len(everything)

    def run(layer, x, w):
        layer.build((None, 4))
        with tf.GradientTape() as tape:
            x = tf.constant(x)
            tape.watch(x)
            y = tf.reduce_sum(layer(x, training=True) * w)
        return tape.gradient(y, [x, layer.gamma.value, layer.beta.value])

    plain, synced = keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
    to_x, to_gamma, to_beta = run(plain, everything, weights)
    own_x, own_gamma, own_beta = run(synced, everything[start:stop], weights[start:stop])
    np.testing.assert_allclose(synced.moving_mean, plain.moving_mean, rtol=1e-5)
    np.testing.assert_allclose(synced.moving_variance, plain.moving_variance, rtol=1e-5)
    np.testing.assert_allclose(own_x, to_x[start:stop], rtol=1e-3, atol=1e-5)
    total = hvd.allreduce(own_gamma, op=hvd.Sum)
    np.testing.assert_allclose(total, to_gamma, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(hvd.allreduce(own_beta, op=hvd.Sum), to_beta, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("several_ranks")
def test_a_step_that_reduces_nothing_is_an_error():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(HvdsyncError, match="DistributedSGD.*reduces nothing"):
        optimizer.apply([], [])
