"""What a worker asks and tells while it trains an epoch: learning rates out, progress in."""

from __future__ import annotations

import time
from collections.abc import Callable

from hvdsync.sync.schedule import scale_learning_rate, warmup
from hvdsync.train.config import TrainConfig
from hvdsync.train.feed import Epoch
from hvdsync.train.listener import Listener, Standing
from hvdsync.train.worker import Observer, Worker


class EpochObserver(Observer):
    """Hands out learning rates, passes on how far the epoch is, and when it is to stop.

    ``epochs`` were over before this one, ``step`` is the number of optimizer steps so far.
    ``step_ended(passes)`` is called after each step, with the passes done; it says whether to stop.
    """

    def __init__(
        self,
        config: TrainConfig,
        epoch: Epoch,
        epochs: int,
        step: int,
        worker: Worker,
        listener: Listener,
        step_ended: Callable[[int], bool],
    ) -> None:
        self._epoch = epoch
        self._step = step
        self._worker = worker
        self._listener = listener
        self._step_ended = step_ended
        self._passes = 0
        self._samples = 0
        self._started = time.perf_counter()
        self._rate = 0.0
        # Updates that are added up, not averaged, move the model by all workers' steps already.
        adds_up = config.update == "async"
        rule = None if config.scale_lr == "none" or adds_up else config.scale_lr
        self._full_rate = scale_learning_rate(config.lr, rule)
        # From the rate of one worker; a rate that does not grow needs no warming up.
        steps = round(config.warmup_epochs * epoch.steps_in_whole)
        self._factor = warmup(steps, start=config.lr / self._full_rate)
        # Steps at this number of workers: the run may have begun with another.
        self._first = epochs * epoch.steps_in_whole + epoch.steps_before

    def step_begins(self) -> float:
        self._rate = self._full_rate * self._factor(
            self._first + self._passes // self._epoch.accumulate
        )
        return self._rate

    def pass_ended(self) -> bool:
        self._samples += self._epoch.samples[self._passes]
        self._passes += 1
        step_is_over = self._passes % self._epoch.accumulate == 0
        if step_is_over:
            self._step += 1
        self._listener.advanced(
            Standing(
                step=self._step,
                samples=self._samples,
                seconds=time.perf_counter() - self._started,
                learning_rate=self._rate,
                tally=self._worker.tally,
            )
        )
        return step_is_over and self._step_ended(self._passes)
