"""A signal on one rank during ``fit``: all ranks save after the same batch, and end."""

import os
import signal

import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from tests.parallel.keras.helpers import data, make_model, values


class SignalAt(keras.callbacks.Callback):
    """SIGUSR1 on the last rank, before a batch of an epoch."""

    def __init__(self, epoch, batch):
        super().__init__()
        self.at = epoch, batch
        self.epoch = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == self.at and hvd.rank() == hvd.size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)


def fit_until_signalled(checkpoint, **options):
    """Epochs of eight batches; the signal comes in the third batch of the second one."""
    model = make_model()
    model.compile(optimizer=hvd.distribute(keras.optimizers.Adam(0.01)), loss="mse")
    x, y = data(samples=48)
    # Asked at every batch: a fit of this size is over in no time.
    preemption = hvd.Preemption(every=1)
    preempting = hvd.callbacks.PreemptionCallback(checkpoint, preemption=preemption, **options)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with preemption:
        model.fit(
            x[hvd.rank() :: hvd.size()],
            y[hvd.rank() :: hvd.size()],
            batch_size=6 // hvd.size() or 1,
            epochs=4,
            verbose=0,
            callbacks=[broadcast, SignalAt(1, 2), preempting],
        )
    return model, preempting


def test_all_ranks_save_after_the_same_batch_and_exit(shared_path):
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as end:
        fit_until_signalled(
            hvd.Checkpoint(shared_path / "run", background=True),
            exit_code=75,
            state=lambda batches: {"read": batches * 6},
        )
    assert end.value.code == 75
    assert signal.getsignal(signal.SIGUSR1) is before

    model = make_model()
    model.compile(optimizer=hvd.distribute(keras.optimizers.Adam(0.01)), loss="mse")
    found = hvd.Checkpoint(shared_path / "run").restore(model=model)
    assert (found["epoch"], found["batch"], found["read"]) == (1, 3, 18)
    assert found["step"] == int(model.optimizer.iterations) == 8 + 3
    first = make_model()
    assert any(
        (a != b).any() for a, b in zip(values(model.weights), values(first.weights), strict=True)
    )


def test_fit_may_return_instead(shared_path):
    model, preempting = fit_until_signalled(hvd.Checkpoint(shared_path / "run"), exit_code=None)
    assert preempting.preempted
    assert int(model.optimizer.iterations) == 11
    assert all(hvd.allgather_object(preempting.preempted))
    other = make_model()
    other.compile(optimizer=hvd.distribute(keras.optimizers.Adam(0.01)), loss="mse")
    hvd.Checkpoint(shared_path / "run").restore(model=other)
    for mine, saved in zip(values(model.weights), values(other.weights), strict=True):
        np.testing.assert_array_equal(mine, saved)


def test_without_a_signal_nothing_is_saved_and_the_handlers_go(shared_path):
    before = signal.getsignal(signal.SIGTERM)
    model = make_model()
    model.compile(optimizer=hvd.distribute(keras.optimizers.SGD(0.01)), loss="mse")
    preempting = hvd.callbacks.PreemptionCallback(hvd.Checkpoint(shared_path / "none"))
    heard = []

    class Listening(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            heard.append(signal.getsignal(signal.SIGTERM) is before)

    x, y = data()
    model.fit(x, y, batch_size=12, verbose=0, callbacks=[preempting, Listening()])
    assert heard and not any(heard)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not preempting.preempted
    assert hvd.Checkpoint(shared_path / "none").latest() is None
