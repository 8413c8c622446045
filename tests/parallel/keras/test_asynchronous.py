"""``update=Asynchronous()`` in Keras: what each rank's optimizer does counts in full.

Gradients do not depend on the weights, so that what steps come to is known in any order.
"""

import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from hvdsync.errors import LaunchError
from tests.parallel.keras.helpers import assert_equal_on_all_ranks

RATE = 0.5


def linear(**options):
    """Each step moves the kernel by ``-RATE`` times the sum of the batch."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    model.set_weights([np.ones((3, 1), np.float32)])
    optimizer = hvd.distribute(keras.optimizers.SGD(RATE), update=hvd.Asynchronous(), **options)
    model.compile(optimizer, lambda y, z: keras.ops.sum(z), jit_compile=False)
    return model


def batch(rank, step):
    return np.random.default_rng((rank, step)).integers(-4, 5, (2, 3)).astype(np.float32)


def fit(model, rank, steps, first=0):
    x = np.concatenate([batch(rank, step) for step in range(first, first + steps)])
    model.fit(x, np.zeros(len(x)), batch_size=2, shuffle=False, verbose=0)


def moved_by(steps_of):
    """What so many steps of each rank come to."""
    sums = [batch(rank, step).sum(0) for rank, n in steps_of.items() for step in range(n)]
    return -RATE * np.sum(sums, axis=0).reshape(3, 1)


def test_the_model_moves_by_the_sum_of_what_every_ranks_own_optimizer_did(mpi):
    model = linear()
    steps_of = {rank: 4 + 3 * rank for rank in range(hvd.size())}
    assert model.optimizer.replicas_equal
    fit(model, hvd.rank(), steps_of[hvd.rank()])
    assert not model.optimizer.replicas_equal
    model.optimizer.synchronize_replicas()
    assert model.optimizer.replicas_equal
    np.testing.assert_array_equal(model.get_weights()[0], 1 + moved_by(steps_of))
    assert_equal_on_all_ranks(model.variables)


def test_a_checkpoint_is_of_one_model_and_training_goes_on_from_it(mpi, shared_path):
    model = linear()
    steps_of = dict.fromkeys(range(hvd.size()), 3)
    fit(model, hvd.rank(), 3)
    checkpoint = hvd.Checkpoint(shared_path)
    checkpoint.save(1, model=model)
    saved = model.get_weights()[0]
    np.testing.assert_array_equal(saved, 1 + moved_by(steps_of))
    fit(model, hvd.rank(), 2)
    checkpoint.restore(model=model)
    model.optimizer.synchronize_replicas()
    np.testing.assert_array_equal(model.get_weights()[0], saved)
    fit(model, 0, 1)
    model.optimizer.synchronize_replicas()
    expected = saved + hvd.size() * moved_by({0: 1})
    np.testing.assert_array_equal(model.get_weights()[0], expected)


def test_batches_of_a_step_are_averaged_on_the_rank(mpi):
    model = linear(accumulate=2)
    fit(model, hvd.rank(), 4)
    model.optimizer.synchronize_replicas()
    half = 1 + moved_by(dict.fromkeys(range(hvd.size()), 4)) / 2
    np.testing.assert_array_equal(model.get_weights()[0], half)


def test_ranks_over_gloo_are_told_how_to_start(gloo):
    with pytest.raises(LaunchError, match=f"horovodrun over Gloo.*--mpi -np {hvd.size()}"):
        linear()
