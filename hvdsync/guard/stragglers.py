"""Who holds the others up, and why: marked parts of each rank's steps in, one verdict for all out.

Every so many steps one small exchange; in between nothing travels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hvdsync.comm import world
from hvdsync.guard.straggler_report import StragglerReport, judge
from hvdsync.guard.time_split import TimeSplit
from hvdsync.guard.usage import Usage

logger = logging.getLogger(__name__)


class Stragglers:
    """Splits the time of each rank's steps, and names the rank that the others wait for.

    ```python
    stragglers = hvd.Stragglers(every=100)
    for x, y in stragglers.watch(loader):
        loss_of(model(x), y).backward()
        optimizer.step()
        stragglers.step()
    ```

    A step is what lies between two calls of :meth:`step`: waiting for data, which is what
    :meth:`watch` or :meth:`data_wait` mark; standing still in collectives; saving checkpoints; and
    computing, which is the rest. Of the standing still, what the rank that came last had is
    communication; what others had more is waiting for it. The first call starts the clock, so that
    compiling in the first step is not counted.

    At every ``every``-th step all ranks learn the split of all (:class:`StragglerReport`). Rank 0
    logs the slowest rank, by how much, and why: as a warning when it costs all of them more than
    ``tolerance`` of their time and was not just said, otherwise with level INFO.

    Arguments:
        every: steps from one exchange to the next, equal on all ranks.
        tolerance: share of the time of a step that a slow rank may cost without a warning.
        tell: called on rank 0 in place of the log, with each report and whether it is worth a
            warning.

    On the wire: one all-gather of 16 bytes for each step and rank, at every ``every``-th call.
    Raises ``ValueError`` for other values.
    """

    def __init__(
        self,
        every: int = 100,
        *,
        tolerance: float = 0.2,
        tell: Callable[[StragglerReport, bool], None] | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"Stragglers: every is {every}, expected a number of steps from 1 up")
        if tolerance < 0:
            raise ValueError(f"Stragglers: tolerance is {tolerance}, expected 0 or more")
        self.every = every
        self.tolerance = tolerance
        self._tell = tell or _log
        self._split = TimeSplit()
        self._steps = 0
        self._said: tuple[int, str] | None = None

    def watch(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, as they are; the time until each of them is there counts as data."""
        with self.data_wait():
            source = iter(batches)
        while True:
            try:
                with self.data_wait():
                    batch = next(source)
            except StopIteration:
                return
            yield batch

    def data_wait(self) -> AbstractContextManager[None]:
        """Context in which the training thread waits for its next batch."""
        return self._split.data_wait()

    def data_came_first(self, before: Usage, seconds: float) -> None:
        """Of the time since the reading ``before`` the first ``seconds`` were waiting for data.

        In place of :meth:`data_wait`, where a framework fetches a batch inside of its step.
        """
        self._split.data_first(before, seconds)

    def skip(self) -> None:
        """Leave out what was done since the last step: evaluation, for instance."""
        self._split.skip()

    def step(self, number: int | None = None, *, meets: bool = True) -> StragglerReport | None:
        """End a step; every rank calls it equally often. A report at each ``every``-th.

        ``number`` is the step's, from 1, where it is not the number of calls. ``meets``, alike on
        all ranks, says whether they may exchange here: one that is due waits until they may.
        Collective at each ``every``-th call after the first; with one rank nothing travels, and the
        report says where its time went.
        """
        self._steps = self._steps + 1 if number is None else number
        is_due = self._split.step() >= self.every
        return self.report() if is_due and meets else None

    def report(self) -> StragglerReport | None:
        """The report on the steps since the last one, of which every rank has as many; collective.

        For the end of a run; :meth:`step` calls it when it is time to. None when there are none.
        """
        rows, evidence = self._split.take()
        if not len(rows):
            return None
        everyone = self._exchange(np.append(rows.reshape(-1), evidence))
        steps = everyone[:, : rows.size].reshape(-1, *rows.shape)
        report = judge(self._steps - len(rows) + 1, steps, everyone[:, rows.size :])
        if world.current().rank == 0:
            self._tell(report, self._is_news(report))
        # What rank 0 does with it is no part of a step, on any rank.
        self._split.skip()
        return report

    def _exchange(self, mine: np.ndarray) -> np.ndarray:
        comm = world.current()
        flat = mine.astype(np.float32)
        if comm.size > 1:
            flat = comm.allgather(flat, "hvdsync.stragglers")
        return flat.reshape(comm.size, -1).astype(np.float64)

    def _is_news(self, report: StragglerReport) -> bool:
        said = (report.slowest, report.kind) if report.lost > self.tolerance else None
        before, self._said = self._said, said
        return said is not None and said != before


def _log(report: StragglerReport, is_news: bool) -> None:
    logger.log(logging.WARNING if is_news else logging.INFO, "%s", report)
