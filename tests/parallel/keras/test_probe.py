"""A rank that computes wrong numbers is named by the probe, on both backends of Keras."""

import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from hvdsync.errors import SilentCorruption
from tests.parallel.keras.helpers import data, fit, values
from tests.parallel.keras_nets import noisy_net


def batch():
    return np.random.default_rng(hvd.rank()).normal(size=(6, 5)).astype("float32")


def loss(model, batch):
    return keras.ops.mean(keras.ops.square(model(batch, training=True)))


def wrong(rank):
    return lambda model, batch: loss(model, batch) * (1.5 if hvd.rank() == rank else 1.0)


def test_ranks_that_compute_alike_pass_and_the_model_stays_as_it_was():
    model = noisy_net()
    before = values(model.variables)
    probe = hvd.CorruptionProbe(loss, every=1)
    for _ in range(3):
        assert probe.check(model, batch()) == ()
    for found, expected in zip(values(model.variables), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_rank_that_computes_wrong_numbers_is_named():
    if hvd.size() < 2:
        pytest.skip("one rank")
    with pytest.raises(SilentCorruption) as error:
        hvd.CorruptionProbe(wrong(1), every=1).check(noisy_net(), batch())
    text = str(error.value)
    assert "kernel' (float32 (5, 7))" in text
    if hvd.size() == 2:
        assert "one of two ranks computes wrong numbers" in text
    else:
        assert "rank 1 computes wrong numbers" in text and "ranks 0, 2 agree" in text


def test_a_fit_of_ranks_that_compute_alike_is_left_alone():
    models = []
    for callbacks in ([], [hvd.callbacks.CorruptionProbeCallback(data(12), every=2)]):
        model = noisy_net()
        model.compile(hvd.distribute(keras.optimizers.SGD(0.1)), "mse")
        fit(model, *data(), 4, 1, callbacks=callbacks)
        models.append(model)
    for found, expected in zip(*(values(m.variables) for m in models), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_callback_ends_the_fit():
    if hvd.size() < 2:
        pytest.skip("one rank")
    model = noisy_net()
    model.compile(hvd.distribute(keras.optimizers.SGD(0.1)), "mse")
    probe = hvd.callbacks.CorruptionProbeCallback(batch(), wrong(0), every=3)
    with pytest.raises(SilentCorruption, match="step 3: .*wrong numbers"):
        fit(model, *data(), 4, 1, callbacks=[probe])
