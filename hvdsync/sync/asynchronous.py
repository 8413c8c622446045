"""Parameters that all ranks train at once: this rank's changes go in, everybody's come out.

NumPy arrays through MPI's one-sided windows; between meetings no rank waits for another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from hvdsync.comm import clock, windows, world
from hvdsync.errors import StalledRank

# What ranks tell one another: their steps, and that a meeting is called.
_STEPS, _CALL = range(2)
# In place of steps: a rank that has come to a meeting holds nobody up.
_ARRIVED = int(np.iinfo(np.int64).max)
_SHORTEST_POLL, _LONGEST_POLL = 0.001, 0.05


class SharedParameters:
    """The parameters of one model, shared by all ranks and held by each in equal parts.

    :attr:`values` are this rank's copies of them, in the shapes of ``arrays``: write to them, then
    :meth:`exchange`. What travels is by how much they changed, so any optimizer may have changed
    them, and what all ranks push adds up: Dean et al., "Large Scale Distributed Deep Networks"
    (Downpour SGD), NIPS 2012, with every rank a worker and a part of the parameter server.

    Arguments:
        arrays: float32 or float64, alike in number, shape and dtype on all ranks; those of rank 0
            are what is shared at first.
        staleness: how many steps a rank may be ahead of the slowest: it then waits, and the values
            it goes on with hold all that any rank pushed more than so many steps ago (Ho et al.,
            "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NIPS
            2013). None is no bound.
        wait_limit: seconds that this rank waits at most for one that makes no step; 0 is no limit.

    Making one is collective. Raises :class:`LaunchError` where ranks were not started over MPI, and
    ``ValueError`` for other dtypes. ``waited_seconds`` adds up the time that exchanges took.
    """

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        *,
        staleness: int | None = None,
        wait_limit: float = 0.0,
    ) -> None:
        kinds = sorted({array.dtype.name for array in arrays})
        if unfit := [kind for kind in kinds if kind not in ("float32", "float64")]:
            raise ValueError(
                f"shared parameters are float32 or float64, found {', '.join(unfit)}; give halves "
                "as float32"
            )
        connection = windows.connect()
        self._rank, size = connection.Get_rank(), connection.Get_size()
        self._others = [rank for rank in range(size) if rank != self._rank]
        self._staleness, self._wait_limit = staleness, wait_limit
        self._flats = [
            _Flat(connection, [array for array in arrays if array.dtype == kind]) for kind in kinds
        ]
        views = {kind: iter(flat.views()) for kind, flat in zip(kinds, self._flats, strict=True)}
        self.values = [next(views[array.dtype.name]) for array in arrays]
        self._counters = windows.SharedCounters(connection, 2)
        self._known = dict.fromkeys(self._others, 0)
        self.steps = 0
        self.waited_seconds = 0.0
        self.reset()

    @clock.spend("stalled")
    def exchange(self) -> None:
        """Push what changed in :attr:`values` since the last time; they become the shared ones.

        One step, of this rank alone, ``steps`` since the last meeting. On the wire: each value
        there and back. Raises :class:`StalledRank` when a rank that is too far behind makes no step
        for longer than the limit, and :class:`RankFailed` when another's end has taken MPI away.
        """
        started = time.perf_counter()
        self._push()
        self.steps += 1
        # After the values have arrived: who reads this counter finds them.
        self._counters.set(self._rank, _STEPS, self.steps)
        if self._staleness is not None and self._wait_for_steps(self.steps - self._staleness):
            self._pull()
        self.waited_seconds += time.perf_counter() - started

    def agree(self) -> bool:
        """Push what changed, wait for all ranks, and leave the same bits in all their values.

        Whether any rank had made a step since the last meeting; the same on all ranks. Collective:
        ranks that are there hold nobody up by their staleness, and steps count from 0 again. On the
        wire: each value there and back, twice.
        """
        self._push()
        with self._meeting(self.steps) as steps:
            self._pull()
        return any(steps)

    def reset(self) -> None:
        """Share what rank 0 has in its values in place of what was shared; collective."""
        with self._meeting():
            for flat in self._flats:
                flat.reset()

    def meet(self, number: int) -> list[int]:
        """Wait for all ranks; the numbers that they came with, in their order. Collective.

        As :meth:`agree` with regard to steps, but nobody's values change.
        """
        with self._meeting(number) as numbers:
            return numbers

    def call(self) -> None:
        """Have :attr:`called` be True on every rank, until the next meeting; of one rank alone."""
        for rank in (self._rank, *self._others):
            self._counters.set(rank, _CALL, 1)

    @property
    def called(self) -> bool:
        """Whether any rank has called for a meeting. Nothing travels."""
        return self._counters.read(self._rank, _CALL) != 0

    def close(self) -> None:
        """Give the shared memory back, and keep the values; collective, after a meeting."""
        self._counters.close()
        for flat in self._flats:
            flat.shared.close()

    def _push(self) -> None:
        for flat in self._flats:
            flat.push()

    def _pull(self) -> None:
        for flat in self._flats:
            flat.pull()

    @contextmanager
    def _meeting(self, number: int = 0) -> Iterator[list[int]]:
        """Context in which all ranks are at once, and nobody pushes; gives all ranks' numbers."""
        self._counters.set(self._rank, _STEPS, _ARRIVED)
        # Not yet in a collective: a slow rank that makes its steps is none that does not come.
        self._wait_for_steps(_ARRIVED)
        mine = np.array([number], np.int64)
        yield world.current().allgather(mine, "hvdsync.asynchronous.meeting").tolist()
        self.steps = 0
        self._known = dict.fromkeys(self._others, 0)
        for which in (_STEPS, _CALL):
            self._counters.set(self._rank, which, 0)
        world.current().barrier()

    @clock.spend("stalled")
    def _wait_for_steps(self, least: int) -> bool:
        """Return when every rank has made ``least`` steps; whether that was not known before.

        The values may then be older than what the counters say.
        """
        behind = [rank for rank in self._others if self._known[rank] < least]
        for rank in behind:
            known, moved = -1, time.monotonic()
            while (count := self._counters.read(rank, _STEPS)) < least:
                still = time.monotonic() - moved
                if count > known:
                    known, moved = count, time.monotonic()
                elif self._wait_limit and still > self._wait_limit:
                    raise self._stalled(rank, count, still)
                # As finely as it is worth while, and a core for those who compute.
                time.sleep(min(_SHORTEST_POLL + still / 20, _LONGEST_POLL))
            self._known[rank] = count
        return bool(behind)

    def _stalled(self, rank: int, count: int, seconds: float) -> StalledRank:
        size = len(self._others) + 1
        here = f"rank {self._rank} of {size} waits"
        if self.steps:
            here += f" after {self.steps:,} steps"
        bound = "" if self._staleness is None else f" (staleness {self._staleness})"
        return StalledRank(
            f"{here} for rank {rank}, which has made {count:,} since all ranks met{bound} and none "
            f"for {seconds:.3g} s. Look for what stopped rank {rank}, or give init() a longer "
            "wait_limit"
        )


class _Flat:
    """This rank's copies of all shared arrays of one dtype, one after the other."""

    def __init__(self, connection: object, arrays: Sequence[np.ndarray]) -> None:
        self._shapes = [array.shape for array in arrays]
        self._values = np.concatenate([array.reshape(-1) for array in arrays])
        # As they were after the last exchange.
        self._base = self._values.copy()
        self._change = np.empty_like(self._values)
        self.shared = windows.SharedVector(connection, self._values.size, self._values.dtype)

    def views(self) -> list[np.ndarray]:
        ends = np.cumsum([int(np.prod(shape)) for shape in self._shapes])
        parts = np.split(self._values, ends[:-1])
        return [part.reshape(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def push(self) -> None:
        np.subtract(self._values, self._base, out=self._change)
        self.shared.add(self._change, self._base)
        # What the shared ones were right after this change.
        self._base += self._change
        np.copyto(self._values, self._base)

    def pull(self) -> None:
        self.shared.read(self._base)
        np.copyto(self._values, self._base)

    def reset(self) -> None:
        self.shared.become(self._values, 0)
        np.copyto(self._base, self._values)
