"""Elastic training with Keras on both backends: state that survives ranks that die or join.

Stands for ``horovod.keras.elastic``; a model goes in, its last committed values come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hvdsync.keras._backend import backend
from hvdsync.keras.runtime import init, shutdown
from hvdsync.sync import elastic
from hvdsync.sync.elastic import VariablesState
from hvdsync.sync.keras_optimizer import build_alone

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a training function whose first argument is an elastic state.

    When a rank dies, the state goes back to its last commit, Horovod starts anew with the ranks
    that are left or joined, the state is made equal on all, and the function runs again.
    """
    return elastic.run(func, _reset, backend.as_lost_rank)


def _reset() -> None:
    shutdown()
    init()


class KerasState(VariablesState):
    """State of a Keras model and its optimizer (stands for Horovod's of the same name).

    ``optimizer`` defaults to the one the model is compiled with; ``kwargs`` become attributes that
    are saved and synchronised too. Raises ``ValueError`` when the model is not built.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        if self.optimizer is not None and not self.optimizer.built:
            build_alone(self.optimizer, model.trainable_variables)

        def listed() -> list[Any]:
            return [*self.model.variables, *(self.optimizer.variables if self.optimizer else ())]

        super().__init__(listed, **kwargs)


class CommitStateCallback(keras.callbacks.Callback):
    """Commits ``state`` every ``batches_per_commit`` batches and at the end of each epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        # Ranks that joined count from here, so all do.
        self.batches_remaining = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.commit()
            self.batches_remaining = self.batches_per_commit

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.commit()

    def commit(self) -> None:
        """Save the state and look for ranks that come or go."""
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Keeps ``state.batch``, the number of the current batch; 0 at the end of each epoch.

    After a reset ``fit`` starts its epoch anew: give it ``steps_per_epoch - state.batch`` steps
    for the first epoch, or a data set that skips what was read.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        params = self.params or {}
        if params.get("steps"):
            if self.steps_per_epoch is None:
                self.steps_per_epoch = params["steps"]
            params["steps"] = self.steps_per_epoch - self.state.batch

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Keeps ``state.epoch``, the number of epochs done over all resets."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        # One more than the epoch that ended: a reset after this must not repeat it.
        self.state.epoch = self.initial_epoch + epoch + 1
