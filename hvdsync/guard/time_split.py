"""One rank's steps: how long each took, and with what it was spent; marked parts in, rows out.

Evidence of what the rank did meanwhile is kept for the whole stretch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from hvdsync.comm import clock
from hvdsync.guard.usage import Usage, children, demand, processor_seconds, reading, threads

# What is kept of each step, in seconds, ...
STEP = ("whole", "data", "stalled", "checkpoint")
# ... and of a stretch of steps: processor seconds while this rank waited for data, and those that
# its threads had or wanted; both in all; the part of the last that they wanted in vain; bytes read
# while it waited for data; processor seconds and bytes read of the processes below this one.
EVIDENCE = (
    "data_cpu",
    "data_wanted",
    "cpu",
    "wanted",
    "delayed",
    "data_read",
    "children_cpu",
    "children_read",
)

# Share of the time from which on it is worth while to look for what else is at work on the data.
_MATTERS = 0.1


class TimeSplit:
    """Measures the steps of this process. :meth:`step` ends one; the first one starts the clock.

    All methods are called by the thread that trains.
    """

    def __init__(self) -> None:
        self._last: tuple[float, ...] | None = None
        self._begin_stretch(_Totals())

    def step(self) -> int:
        """End a step; gives the number of steps that are recorded."""
        now = (time.perf_counter(), *clock.spent())
        if self._last is None:
            self._begin_stretch(_Totals())
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
        before = reading()
        with clock.spend("data"):
            yield
        self._data.add_between(before, reading())

    def data_first(self, before: Usage, seconds: float) -> None:
        """Of the time since the :func:`reading` ``before``, the first ``seconds`` waited for data.

        For frameworks that fetch a batch where Python cannot look, in the step itself.
        """
        clock.add("data", seconds)
        self._data.read += max(reading().read - before.read, 0.0)
        self._fetched_unseen = True

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """(steps, evidence) since the last call: float64 (n, 4) and (8,)."""
        rows = np.array(self._rows, np.float64).reshape(-1, len(STEP))
        whole, data, *others = rows.sum(axis=0)
        now = _Totals(with_children=data > _MATTERS * whole)
        cpu = now.cpu - self._before.cpu
        wanted, delayed = now.wanted_since(self._before)
        data_cpu, data_wanted = self._data.process, self._data.wanted
        if self._fetched_unseen:
            # What is left when all computing was busy.
            computing = whole - data - sum(others)
            data_cpu, data_wanted = max(cpu - computing, 0.0), max(wanted - computing, 0.0)
        below = now.children_since(self._before, whole)
        evidence = (
            data_cpu,
            data_wanted,
            cpu,
            wanted,
            delayed,
            self._data.read,
            below.process,
            below.read,
        )
        self._begin_stretch(now)
        return rows, np.array(evidence, np.float64)

    def _begin_stretch(self, now: _Totals) -> None:
        self._rows: list[tuple[float, ...]] = []
        self._data = Usage()
        self._fetched_unseen = False
        self._before = now


class _Totals:
    """What this process, its threads and the processes below it have used so far."""

    def __init__(self, with_children: bool = False) -> None:
        self.cpu = processor_seconds()
        self.threads = threads()
        self.children = children() if with_children else None

    def wanted_since(self, before: _Totals) -> tuple[float, float]:
        """Processor seconds that threads had or wanted, and those wanted in vain."""
        total, delayed = 0.0, 0.0
        for number, (running, waiting) in self.threads.items():
            earlier = before.threads.get(number, (0.0, 0.0))
            running, waiting = running - earlier[0], waiting - earlier[1]
            wanted = demand(running, waiting)
            total, delayed = total + wanted, delayed + wanted - running
        return total, delayed

    def children_since(self, before: _Totals, seconds: float) -> Usage:
        """What the processes below used since then, ``seconds`` ago; nothing if it was not read."""
        below = Usage()
        for number, (usage, age) in (self.children or {}).items():
            if before.children is not None:
                earlier, _ = before.children.get(number, (Usage(), 0.0))
                below.add_between(earlier, usage)
            else:
                # As much as in other times of its life.
                share = min(seconds / age, 1.0) if age > 0 else 1.0
                below.process += share * usage.process
                below.read += share * usage.read
        return below
