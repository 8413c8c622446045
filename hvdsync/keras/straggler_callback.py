"""Stragglers inside Keras ``fit``: batches in, the split of every rank's time and a verdict out.

Exported as ``hvd.callbacks.StragglerCallback``, for both backends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hvdsync.guard.straggler_report import StragglerReport
from hvdsync.guard.stragglers import Stragglers
from hvdsync.guard.usage import Usage, reading
from hvdsync.keras._backend import backend
from hvdsync.keras._base_callback import DistributedCallback, loop_of_fit


class StragglerCallback(DistributedCallback):
    """Splits the time of each rank's batches in ``fit``, and names the rank that others wait for.

    Arguments are those of :class:`Stragglers`, which is ``stragglers``; the last report is
    ``report``. Waiting for data is what the batch takes to come: on TensorFlow inside of the step,
    on PyTorch between the end of one batch and the beginning of the next, together with the
    callbacks that follow this one; so put it last. Validation and what else happens between epochs
    is left out.
    """

    def __init__(
        self,
        every: int = 100,
        *,
        tolerance: float = 0.2,
        tell: Callable[[StragglerReport, bool], None] | None = None,
    ) -> None:
        super().__init__()
        self.stragglers = Stragglers(every, tolerance=tolerance, tell=tell)
        self.report: StragglerReport | None = None
        self._arrival: Callable[[], float] | None = None
        self._began: tuple[float, Usage] | None = None
        self._wait: AbstractContextManager[None] | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._arrival = backend.stamp_batches(loop_of_fit())
        self.stragglers.skip()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.stragglers.skip()
        self._begin_wait()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._end_wait()
        if self._arrival is not None:
            self._began = time.time(), reading()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._arrival is not None and self._began is not None:
            began, usage = self._began
            self.stragglers.data_came_first(usage, max(self._arrival() - began, 0.0))
        self.report = self.stragglers.step() or self.report
        self._begin_wait()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._end_wait()

    on_train_end = on_epoch_end

    def on_test_begin(self, logs: Any = None) -> None:
        self._end_wait()

    def _begin_wait(self) -> None:
        if self._arrival is None:
            self._wait = self.stragglers.data_wait()
            self._wait.__enter__()

    def _end_wait(self) -> None:
        wait, self._wait = self._wait, None
        if wait is not None:
            wait.__exit__(None, None, None)
