"""One array of each rank of a host in, their sum out: through memory that they have in common.

Nothing is negotiated and nothing goes through the network stack. NumPy only.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from hvdsync.comm import host_memory, in_flight, world

# Bytes of a cache line: flags of different ranks do not lie on one.
LINE = 64
_FLAGS = 3
_FILLED, _SUMMED, _TAKEN = range(_FLAGS)

# Elements that are summed at a time, so that a second pass over them finds them in the cache.
_CHUNK = 1 << 15
# Up to so many bytes of all ranks together, more meetings of ranks cost more than they save; and
# among few ranks up to so many, where what they add up may not stay in place.
_SMALL_BYTES = 1 << 17
_FEW, _SMALL_BYTES_OF_FEW = 3, 1 << 25

# To the memory of an array that nobody else has a view of: its own, and that of who counts.
_OWN_REFERENCES = 2

# A rank that waits first looks again and again, where it has a core of its own to do so; then it
# sleeps between looks.
_SPIN_SECONDS = 2e-3
_SHORTEST_SLEEP, _LONGEST_SLEEP = 5e-5, 1e-3
_LOOK_AROUND_SECONDS = 0.1


# All of this process.
_living: weakref.WeakSet[HostSum] = weakref.WeakSet()


@dataclass(frozen=True)
class Slot:
    """What is summed: its name on all ranks, where ``scale`` times the sum is to be.

    With ``in_place`` it may also be left in ``mine``, where that is less work.
    """

    name: str
    result: np.ndarray
    scale: float
    in_place: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of one rank's array, on whole cache lines."""
        return -(-self.result.nbytes // LINE) * LINE


class HostSum:
    """The sum over ranks of one array each, step after step.

    ``mine`` is this rank's array, in the common memory: it is filled after :meth:`clear`, and
    :meth:`post` shows it to the others. :meth:`advance`, called until it says so, then waits for
    the others and leaves the result in ``result``, which is the slot's array or ``mine``. Elements
    are added in the order of ranks, so that all ranks get the same bits.

    Ranks add up everything each, or a share each and read those of the others: then a sum that is
    left in place touches the least memory, but ranks meet three times.
    """

    def __init__(
        self,
        slot: Slot,
        flags: Sequence[np.ndarray],
        arrays: Sequence[np.ndarray],
        rank: int,
        has_ended: Callable[[int], BaseException | None],
    ) -> None:
        self.name = slot.name
        self._scale = slot.scale
        self.mine = arrays[rank]
        self._arrays = arrays
        self._rank = rank
        self._has_ended = has_ended
        self._flags = flags
        self._turn = 0
        size = len(arrays)
        few = size <= _FEW and not slot.in_place
        small = slot.bytes * size <= (_SMALL_BYTES_OF_FEW if few else _SMALL_BYTES)
        self._steps, self.result = [HostSum._add_up_all], slot.result
        if not small:
            self._steps = [HostSum._add_up_share, HostSum._take_shares]
            if slot.in_place:
                self._steps.append(HostSum._let_others_take)
                self.result = self.mine
        self._shares = [
            slice(a, b)
            for a, b in pairwise([len(slot.result) * i // size for i in range(size + 1)])
        ]
        _living.add(self)
        self._scratch = np.empty(min(_CHUNK, len(slot.result)), slot.result.dtype)
        own_core = len(os.sched_getaffinity(0)) >= size
        self._spin_seconds = _SPIN_SECONDS if own_core else 0.0
        self._steps_done = 0
        self._handed_over: list[np.ndarray] = []

    def clear(self) -> None:
        """Wait until all ranks have read what this one showed them last."""
        self._wait(_TAKEN)

    def post(self) -> None:
        """This rank's array is filled."""
        self._turn += 1
        self._flags[self._rank][_FILLED] = self._turn
        in_flight.begin(self.name)

    def advance(self) -> bool:
        """Wait for what is next, and do it; whether the result is there now.

        Raises the error that ``has_ended`` has for a rank that will not come.
        """
        self._steps[self._steps_done](self)
        self._steps_done += 1
        if self._steps_done < len(self._steps):
            return False
        self._steps_done = 0
        in_flight.end(self.name)
        return True

    def _add_up_all(self) -> None:
        self._wait(_FILLED)
        self._add_up(slice(0, len(self.result)), self.result)
        self._flags[self._rank][_TAKEN] = self._turn

    def _add_up_share(self) -> None:
        self._wait(_FILLED)
        share = self._shares[self._rank]
        self._add_up(share, self.mine[share])
        self._flags[self._rank][_SUMMED] = self._turn

    def _take_shares(self) -> None:
        self._wait(_SUMMED)
        for share, array in zip(self._shares, self._arrays, strict=True):
            if array is not self.result:
                np.copyto(self.result[share], array[share])
        self._flags[self._rank][_TAKEN] = self._turn

    def _let_others_take(self) -> None:
        self._wait(_TAKEN)

    def hand_over(self) -> np.ndarray:
        """The slot's array as the caller's own: the next result goes into another one.

        That is one handed over before, once nothing is left of it: memory that is new to the
        process costs as much as the sum does.
        """
        result = self.result
        assert result is not self.mine
        for i, before in enumerate(self._handed_over):
            if sys.getrefcount(before.base) == _OWN_REFERENCES:
                self.result = self._handed_over.pop(i)
                break
        else:
            self.result = aligned(len(result), result.dtype)
        self._handed_over.append(result)
        return result[:]  # a view, which counts

    @property
    def is_begun_by_others(self) -> bool:
        """Whether another rank is at a turn that this one has not come to."""
        return any(flags[_FILLED] > self._turn for flags in self._flags)

    def contribute_zeros(self) -> None:
        """This rank's part of a turn to which it brings nothing. Its result is thrown away."""
        self.clear()
        self.mine[:] = 0
        self.post()
        while not self.advance():
            pass

    def _add_up(self, share: slice, result: np.ndarray) -> None:
        first, second, *others = (array[share] for array in self._arrays)
        for start in range(0, len(result), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            # Not in place: the result may belong where a later rank's elements are.
            total = np.add(first[chunk], second[chunk], out=self._scratch[: len(result) - start])
            for other in others:
                total += other[chunk]
            np.multiply(total, self._scale, out=result[chunk])

    def _wait(self, which: int) -> None:
        for rank, flags in enumerate(self._flags):
            if flags[which] < self._turn:
                self._wait_for(rank, which)

    def _wait_for(self, rank: int, which: int) -> None:
        flags = self._flags[rank]
        started = time.perf_counter()
        while time.perf_counter() - started < self._spin_seconds:
            os.sched_yield()
            if flags[which] >= self._turn:
                return
        pause, looked = _SHORTEST_SLEEP, started
        while flags[which] < self._turn:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP)
            now = time.perf_counter()
            if now - looked > _LOOK_AROUND_SECONDS:
                looked = now
                error = self._has_ended(rank)
                # What it did before is done.
                if error is not None and flags[which] < self._turn:
                    in_flight.end(self.name)
                    raise error


def aligned(length: int, dtype: np.dtype) -> np.ndarray:
    """A new flat array that begins on a cache line, as frameworks want what they do not copy."""
    whole = np.empty(length * dtype.itemsize + LINE, np.uint8)
    start = -whole.ctypes.data % LINE
    return whole[start : start + length * dtype.itemsize].view(dtype)


class _Joined:
    """A thread that takes this rank's part, with zeros, in all sums that others begin."""

    def __init__(self) -> None:
        self.taken = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hvdsync joined", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.wait(_LONGEST_SLEEP):
            for awaited in [s for s in list(_living) if s.is_begun_by_others]:
                try:
                    awaited.contribute_zeros()
                except Exception:  # the ranks' world has ended, which the main thread will say
                    return
                self.taken += 1

    def end(self) -> None:
        """The rank is back."""
        self._over.set()
        self._thread.join()


def join(wait_for_all: Callable[[], Any]) -> int:
    """Wait, by Horovod's ``join``, for all ranks; contribute zeros to their sums until then.

    Gives the rank that joined last. Collective at the end, too: a rank that is late must not take
    a sum that is begun thereafter for one of before.
    """
    joined = _Joined()
    try:
        last = int(wait_for_all())
    finally:
        joined.end()
    if host_memory.may_be_shared():
        # Horovod saw none of these sums: who took part in more of them than it thinks came later.
        missed = world.current().allgather(np.array([joined.taken]), "hvdsync.joined")
        if missed[last] > missed.min():
            last = int(missed.argmin())
    return last


def share(
    slots: Sequence[Slot], has_ended: Callable[[int], BaseException | None]
) -> list[HostSum] | None:
    """A sum for each slot, or None on every rank where they have no memory in common; collective.

    All ranks give equal slots. ``has_ended`` gives the error with which waiting for a rank ends, if
    that will not come.
    """
    if not slots or not host_memory.may_be_shared():
        return None
    flag_bytes = _FLAGS * LINE
    memory = host_memory.share(sum(flag_bytes + slot.bytes for slot in slots))
    if memory is None:
        return None
    sums, start = [], 0
    for slot in slots:
        middle, end = start + flag_bytes, start + flag_bytes + slot.bytes
        used = middle + slot.result.nbytes
        flags = [piece[start:middle].view(np.int64)[:: LINE // 8] for piece in memory.pieces]
        arrays = [piece[middle:used].view(slot.result.dtype) for piece in memory.pieces]
        sums.append(HostSum(slot, flags, arrays, world.current().rank, has_ended))
        start = end
    return sums
