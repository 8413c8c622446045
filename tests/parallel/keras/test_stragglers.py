"""The rank that holds ``fit`` up is named, and why; what the others wait is no computing."""

import time

import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from tests.parallel import slowness
from tests.parallel.cases import matrix_but
from tests.parallel.keras.helpers import data, fit, make_model

STEPS = 12


class Batches(keras.utils.PyDataset):
    """One batch for each step of an epoch; reading one takes as long as ``case`` wants."""

    def __init__(self, case, path):
        super().__init__()
        self._case, self._path = case, path

    def __len__(self):
        return 2 * STEPS + 1  # more than are read ahead while the first step compiles

    def __getitem__(self, index):
        if self._case is not None:
            slowness.slow_down(self._case, self._path)
        return np.ones((4, 5), np.float32), np.ones((4, 1), np.float32)


class Slow(keras.layers.Layer):
    """A layer that does something besides."""

    def __init__(self, case):
        super().__init__()
        self._case = case

    def call(self, x):
        if keras.backend.backend() == "torch":
            slowness.slow_down(self._case, None)
            return x
        import tensorflow as tf

        def slow(array):
            slowness.slow_down(self._case, None)
            return array

        return tf.ensure_shape(tf.numpy_function(slow, [x], tf.float32), x.shape)


@pytest.mark.usefixtures("several_ranks")
@pytest.mark.slow
# Why a rank is slow is told alike in every framework, and in full in PyTorch's suite.
@pytest.mark.parametrize("case", matrix_but(["busy step", "sleeping loader"], slowness.CASES))
def test_a_slow_rank_is_named_with_what_it_does(case, tmp_path):
    slow = hvd.rank() == hvd.size() - 1
    in_loader = slowness.CASES[case][0] == "loader"
    path = slowness.make_file(tmp_path)
    model = make_model()
    if slow and not in_loader:
        model = keras.Sequential([keras.Input((5,)), Slow(case), model])
    model.compile(hvd.distribute(keras.optimizers.SGD(0.01)), "mse")
    told = []
    callback = hvd.callbacks.StragglerCallback(STEPS, tell=lambda *news: told.append(news))
    model.fit(
        Batches(case if slow and in_loader else None, path),
        callbacks=[callback],
        verbose=0,
        shuffle=False,
    )
    slowness.assert_verdict(callback.report, case, hvd.size())
    assert [report for report, _ in told][-1:] == ([callback.report] if hvd.rank() == 0 else [])


def test_a_data_set_is_left_as_it_is_and_validation_is_no_step(monkeypatch):
    x, y = data()
    seen, hour, late = [], 3600.0, [0.0]
    now = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: now() + late[0])

    class Watch(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            late[0] += hour  # as if it took so long

        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)

    model = make_model()
    model.compile(hvd.distribute(keras.optimizers.SGD(0.01)), "mse")
    callback = hvd.callbacks.StragglerCallback(4, tell=lambda *news: None)
    fit(model, x, y, 12, 3, callbacks=[callback, Watch()], validation_data=(x, y))
    assert seen == list(range(4)) * 3
    # Of 12 batches the first one starts the clock.
    assert (callback.report.first_step, callback.report.last_step) == (6, 9)
    assert sum(values.sum() for values in callback.report.seconds.values()) < hour
    reference = make_model()
    reference.compile(keras.optimizers.SGD(0.01), "mse")
    fit(reference, x, y, 12, 3)
    for found, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
