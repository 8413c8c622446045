"""Keras callbacks for training on several ranks: broadcast, global metrics, schedules, checkpoints.

Stands for ``horovod.keras.callbacks`` and ``horovod.tensorflow.keras.callbacks``, on both backends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import keras

from hvdsync.comm import verbs, world
from hvdsync.errors import HvdsyncError
from hvdsync.keras._base_callback import DistributedCallback
from hvdsync.keras._metrics import Record, gather, global_logs
from hvdsync.keras.checkpoint import Checkpoint
from hvdsync.keras.functions import broadcast_variables
from hvdsync.keras.guard_callback import GuardCallback
from hvdsync.keras.preemption import PreemptionCallback
from hvdsync.keras.probe_callback import CorruptionProbeCallback
from hvdsync.keras.straggler_callback import StragglerCallback
from hvdsync.sync.keras_local_steps import statistics_among
from hvdsync.sync.keras_optimizer import sharing_of

logger = logging.getLogger(__name__)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CheckpointCallback",
    "CorruptionProbeCallback",
    "GuardCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "PreemptionCallback",
    "ScheduleCallback",
    "StragglerCallback",
]


class BroadcastGlobalVariablesCallback(DistributedCallback):
    """Before the first batch, every rank gets the model and optimizer state of ``root_rank``.

    Arguments:
        root_rank: the rank whose values count; it may have loaded a checkpoint alone.
        device: accepted for compatibility.
        local_variables: a variable, or several, that stay each rank's own.

    All of the model's variables travel, batch-normalisation statistics too, and the optimizer's,
    which is built for it: slots, step count and learning rate. Raises :class:`RankMismatch` on
    every rank when the models differ, and ``HvdsyncError`` when the model is compiled with a
    plain optimizer.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local: set[int] = set()
        if local_variables is None:
            local_variables = []
        elif hasattr(local_variables, "assign"):
            local_variables = [local_variables]
        for variable in local_variables:
            if not hasattr(variable, "assign"):
                raise ValueError("All local variables must be variables of Keras or TensorFlow.")
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leave this variable to each rank."""
        self._local.add(id(getattr(var, "_value", var)))

    def on_train_begin(self, logs: Any = None) -> None:
        self.broadcast_done = False
        if self.model.built:
            self._broadcast()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done and self.model.built:
            self._broadcast()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Keras calls it, and loops do that call the callback by hand, as Horovod's examples."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        self.broadcast_done = True
        if world.current().size == 1:
            return
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        shared = [v for v in self.model.variables if id(getattr(v, "_value", v)) not in self._local]
        local_steps = getattr(sharing_of(optimizer), "local_steps", None)
        if local_steps is not None:
            local_steps.statistics = statistics_among(
                [v for v in self.model.weights if id(getattr(v, "_value", v)) not in self._local],
                self.model.trainable_variables,
            )
        broadcast_variables(
            [*shared, *(optimizer.variables if optimizer is not None else ())], self.root_rank
        )


class MetricAverageCallback(DistributedCallback):
    """At the end of an epoch, the logs hold the metrics over the samples of all ranks.

    Metric state is pooled, so that means over unequal shards are weighted by their sizes and an
    AUC is that of all samples. Values that are no metric's are averaged, weighted by the number of
    samples. A name that only some ranks log is given to all of them.

    Put it anywhere in the list: it goes first, and every callback, the history and the progress
    bar's last line see global values. Logs of single batches stay local. One pickled all-gather
    per epoch. ``device`` is accepted for compatibility.
    """

    _first = True

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device
        self._fitting = False
        self._phases: dict[str, Record] = {}
        self._last: dict[str, float] = {}

    def on_train_begin(self, logs: Any = None) -> None:
        self._fitting, self._phases, self._last = True, {}, {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._phases = {}

    def on_test_begin(self, logs: Any = None) -> None:
        # Evaluation is about to reset the metrics of training.
        if self._fitting and world.current().size > 1:
            self._phases["training"] = Record(self.model)

    def on_test_end(self, logs: Any = None) -> None:
        if world.current().size == 1:
            return
        if self._fitting:
            self._phases["validation"] = Record(self.model)
        elif logs is not None:
            phases = {"evaluation": Record(self.model)}
            everyone = gather(phases, logs)
            logs.update(global_logs(self.model, everyone, {"evaluation": ""}))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is None or world.current().size == 1:
            return
        self._phases.setdefault("training", Record(self.model))
        everyone = gather(self._phases, logs)
        values = global_logs(self.model, everyone, {"training": "", "validation": "val_"})
        logs.update(values)
        self._last = values

    def on_train_end(self, logs: Any = None) -> None:
        self._fitting = False
        if logs is not None:
            logs.update({name: value for name, value in self._last.items() if name in logs})


class LearningRateScheduleCallback(DistributedCallback):
    """Sets the learning rate to ``initial_lr * multiplier(epoch)`` in a range of epochs.

    Arguments:
        initial_lr: the rate that is multiplied; it is never read from the optimizer, so a resumed
            run follows the same curve.
        multiplier: a function of the epoch, or a number ``m`` for ``m ** (epoch - start_epoch)``.
        start_epoch, end_epoch: first epoch, and the one after the last (None: no end).
        staircase: set once per epoch; otherwise before each batch, with fractions of an epoch.
        momentum_correction: when the rate changes, momentum is scaled with it, so that past
            gradients keep their weight (arXiv:1706.02677, section 2.1).
        steps_per_epoch: number of batches, where Keras does not know it.

    Raises ``ValueError`` when the optimizer has a schedule object of its own. Nothing travels.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch: int = 0
        self.multiplier: Callable[[float], float] = (
            multiplier
            if callable(multiplier)
            else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. Please specify the "
                    f"steps_per_epoch parameter to the {type(self).__name__}()."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        ended = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or ended:
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(self.current_epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = current_rate(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        set_rate(
            self.model.optimizer,
            self.initial_lr * self.multiplier(epoch),
            correct_momentum=self.momentum_correction,
        )


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Gradual warm-up from ``initial_lr / size`` to ``initial_lr`` (arXiv:1706.02677).

    Arguments:
        initial_lr: the rate for the batch of all ranks, reached after ``warmup_epochs``.
        warmup_epochs: length of the warm-up; it rises with each batch.
        momentum_correction, steps_per_epoch: as in :class:`LearningRateScheduleCallback`.
        verbose: 1 logs when the warm-up is over, on rank 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            # The last batch of an epoch reaches the round number.
            epoch += 1.0 / self.steps_per_epoch
            ranks = verbs.size()
            return (epoch * (ranks - 1) / warmup_epochs + 1) / ranks

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch == epoch + 1 and self.verbose > 0 and verbs.rank() == 0:
            rate = current_rate(self.model.optimizer)
            logger.info("epoch %d: finished gradual learning rate warmup to %g", epoch + 1, rate)


class ScheduleCallback(DistributedCallback):
    """Sets the learning rate to ``initial_lr * factor(step)``, counted in optimizer steps.

    ``factor`` is a function such as ``hvd.warmup(...)`` gives. Steps are the optimizer's own count,
    so that a resumed run follows the same curve. Nothing travels.
    """

    def __init__(
        self, initial_lr: float, factor: Callable[[int], float], momentum_correction: bool = True
    ) -> None:
        super().__init__()
        self.initial_lr = initial_lr
        self.factor = factor
        self.momentum_correction = momentum_correction

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        step = int(self.model.optimizer.iterations)
        rate = self.initial_lr * self.factor(step)
        set_rate(self.model.optimizer, rate, correct_momentum=self.momentum_correction)


class CheckpointCallback(DistributedCallback):
    """Saves the model, its optimizer and the epoch; rank 0 alone writes. See ``Checkpoint``.

    Arguments:
        directory: where checkpoints go.
        keep: how many of the newest stay.
        every_epochs: save after each so many epochs, and after the last.
        resume: take the newest whole checkpoint before training and go on with its epoch, at
            most up to the number of epochs that ``fit`` was given.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        every_epochs: int = 1,
        resume: bool = True,
    ) -> None:
        super().__init__()
        self.checkpoint = Checkpoint(directory, keep=keep)
        self.every_epochs = every_epochs
        self.resume = resume
        self._saved: int | None = None
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._saved = None
        if not self.resume:
            return
        found = self.checkpoint.restore(model=self.model)
        if found is not None:
            self._saved = self._epoch = int(found["epoch"])
            # Keras looks at this after on_train_begin, for its own BackupAndRestore.
            self.model._initial_epoch = self._epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch + 1
        if self._epoch % self.every_epochs == 0:
            self._save()

    def on_train_end(self, logs: Any = None) -> None:
        if self._saved != self._epoch:
            self._save()
        self.model._initial_epoch = None
        self.checkpoint.close()

    def _save(self) -> None:
        step = int(self.model.optimizer.iterations)
        self.checkpoint.save(step, model=self.model, epoch=self._epoch)
        self._saved = self._epoch


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """``keras.callbacks.ModelCheckpoint`` of the best model only, written by rank 0.

    ``filepath`` may be given here or set as an attribute before training; Horovod's estimators do
    the latter. Put a :class:`MetricAverageCallback` beside it, so that all ranks judge one value.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: str | os.PathLike[str] | None = None,
    ) -> None:
        name = "best.weights.h5" if save_weights_only else "best.keras"
        super().__init__(
            filepath=name if filepath is None else filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None:
            raise HvdsyncError("BestModelCheckpoint: set filepath before training")
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if verbs.rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if verbs.rank() == 0:
            super().on_epoch_end(epoch, logs)


def current_rate(optimizer: Any) -> float:
    """The learning rate of the next step."""
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def set_rate(optimizer: Any, rate: float, *, correct_momentum: bool) -> None:
    """Set the learning rate; with ``correct_momentum`` scale past updates to the new one.

    Raises ``ValueError`` when the optimizer's rate is a schedule object.
    """
    before = current_rate(optimizer)
    try:
        optimizer.learning_rate = rate
    except TypeError as error:
        raise ValueError(
            "the optimizer has a learning-rate schedule of its own, which a callback cannot "
            "change; give it a number, or leave the callback out"
        ) from error
    # As the optimizer keeps it: the same rate, set again after a restore, must change no bit.
    now = current_rate(optimizer)
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # Keras keeps momentum with the rate multiplied in; only SGD has an attribute of this name.
    if correct_momentum and getattr(inner, "momentum", None) and before and before != now:
        for slot in getattr(inner, "momentums", None) or ():
            slot.assign(slot * (now / before))
