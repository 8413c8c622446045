"""``update=Asynchronous()`` in TensorFlow: what each rank's optimizer does counts in full.

Gradients do not depend on the weights, so that what steps come to is known in any order.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd
from hvdsync.errors import LaunchError
from tests.parallel.tensorflow.helpers import assert_equal_on_all_ranks

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adam": lambda: keras.optimizers.Adam(0.25),
}


def variables():
    return [
        tf.Variable(np.arange(6, dtype=np.float32).reshape(2, 3)),
        tf.Variable(np.ones(2, np.float64)),
    ]


def gradients(rank, step):
    rng = np.random.default_rng((rank, step))
    return [rng.integers(-4, 5, (2, 3)).astype(np.float32), rng.integers(-4, 5, 2).astype(float)]


def train(trained, optimizer, rank, steps, eager=False):
    def apply(*given):
        optimizer.apply(given, trained)

    apply = apply if eager else tf.function(apply)
    for step in range(steps):
        apply(*map(tf.constant, gradients(rank, step)))


def distributed(make=OPTIMIZERS["sgd"], model=None):
    return hvd.distribute(
        variables() if model is None else model, make(), update=hvd.Asynchronous()
    )


@pytest.mark.parametrize(("name", "eager"), [("sgd", False), ("sgd", True), ("adam", False)])
def test_the_model_moves_by_the_sum_of_what_every_ranks_own_optimizer_did(mpi, name, eager):
    model, optimizer = distributed(OPTIMIZERS[name])
    steps_of = {rank: 4 + 3 * rank for rank in range(hvd.size())}
    train(model, optimizer, hvd.rank(), steps_of[hvd.rank()], eager)
    assert not optimizer.replicas_equal
    optimizer.synchronize_replicas()
    assert optimizer.replicas_equal
    expected = [variable.numpy() for variable in variables()]
    for rank, steps in steps_of.items():
        alone = variables()
        train(alone, OPTIMIZERS[name](), rank, steps)
        for total, after, before in zip(expected, alone, variables(), strict=True):
            total += after.numpy() - before.numpy()
    for found, wanted in zip(model, expected, strict=True):
        np.testing.assert_allclose(found.numpy(), wanted, rtol=0, atol=1e-4)
    assert_equal_on_all_ranks([*model, *optimizer.variables])


def test_statistics_meet_with_the_replicas(mpi):
    layers = [keras.Input((3,)), keras.layers.BatchNormalization(center=False)]
    model, optimizer = distributed(model=keras.Sequential(layers))
    (scale,) = model.trainable_variables
    optimizer.apply([tf.ones(3)], [scale])
    mean = model.layers[0].moving_mean
    mean.assign(np.full(3, hvd.rank(), np.float32))
    optimizer.synchronize_replicas()
    np.testing.assert_array_equal(mean.numpy(), np.full(3, (hvd.size() - 1) / 2))
    np.testing.assert_array_equal(scale.numpy(), np.full(3, 1 - 0.5 * hvd.size()))


def test_ranks_over_gloo_are_told_how_to_start(gloo):
    with pytest.raises(LaunchError, match=f"horovodrun over Gloo.*--mpi -np {hvd.size()}"):
        distributed()
