"""One rank's steps: how long each took, and with what it was spent; marked parts in, rows out.

Evidence of what the rank did meanwhile is kept for the whole stretch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from hvdsync.comm import clock
from hvdsync.guard.usage import Usage, children

# What is kept of each step, in seconds, ...
STEP = ("whole", "data", "stalled", "checkpoint")
# ... and of a stretch of steps: seconds in which a processor was at work, or asked for in vain,
# while this rank waited for data, and in all; the latter part of them; bytes that were read while
# it waited for data; seconds at work and bytes read of the processes below this one.
EVIDENCE = ("data_busy", "busy", "delayed", "data_read", "children_busy", "children_read")


class TimeSplit:
    """Measures the steps of this process. :meth:`step` ends one; the first one starts the clock.

    All methods are called by the thread that trains.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[float, ...]] = []
        self._last: tuple[float, ...] | None = None
        self._data_busy = self._data_read = 0.0
        self._usage = Usage()
        self._children = children()

    def step(self) -> int:
        """End a step; gives the number of steps that are recorded."""
        now = (time.perf_counter(), *clock.spent())
        if self._last is None:
            self._begin_stretch()
        else:
            # A part may have shrunk: something that counted for itself is gone.
            self._rows.append(tuple(max(a - b, 0.0) for a, b in zip(now, self._last, strict=True)))
        self._last = now
        return len(self._rows)

    def skip(self) -> None:
        """What was done since the last step belongs to none, such as an evaluation."""
        if self._last is not None:
            self._last = (time.perf_counter(), *clock.spent())

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Context in which the training thread waits for its next batch."""
        before = Usage()
        with clock.spend("data"):
            yield
        spent = Usage().since(before)
        self._data_busy += spent.busy
        self._data_read += spent.read

    def data_first(self, before: Usage, seconds: float) -> None:
        """Of the time since ``before`` was read, the first ``seconds`` were waiting for data.

        For frameworks that fetch a batch where Python cannot look, in the step itself.
        """
        spent = Usage().since(before)
        clock.add("data", seconds)
        self._data_read += spent.read
        # The rest of the step is taken for busy.
        self._data_busy += max(spent.busy - (spent.clock - seconds), 0.0)

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """(steps, evidence) since the last call: float64 (n, 4) and (6,)."""
        rows = np.array(self._rows, np.float64).reshape(-1, len(STEP))
        spent = Usage().since(self._usage)
        below = children()
        fresh = [usage.since(self._children.get(pid, Usage.none())) for pid, usage in below.items()]
        evidence = (
            self._data_busy,
            spent.busy,
            spent.delayed,
            self._data_read,
            sum(usage.busy for usage in fresh),
            sum(usage.read for usage in fresh),
        )
        self._begin_stretch()
        return rows, np.array(evidence, np.float64)

    def _begin_stretch(self) -> None:
        self._rows = []
        self._data_busy = self._data_read = 0.0
        self._usage, self._children = Usage(), children()
