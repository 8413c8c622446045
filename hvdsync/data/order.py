"""In: length, seed, epoch, cursor, rank, size. Out: the one global order of an epoch, and which
positions of it each rank reads; pure functions: any rank can compute the share of any other."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from hvdsync.errors import DataError

Indices = npt.NDArray[np.int64]
Uneven = Literal["pad", "drop", "exact"]


def global_order(length: int, seed: int, epoch: int, shuffle: bool = True) -> Indices:
    """The order in which all ranks together read ``length`` samples in ``epoch``: int64 (length,).

    It sorts raw Philox words, whose stream NumPy keeps for ever; ``Generator.permutation`` may
    change with a release, and a run resumed after an upgrade would read some samples twice.
    """
    if not shuffle:
        return np.arange(length, dtype=np.int64)
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch,)))
    words: npt.NDArray[Any] = np.asarray(bits.random_raw(length))
    return np.argsort(words, kind="stable").astype(np.int64, copy=False)


def share(length: int, cursor: int, rank: int, size: int, uneven: Uneven = "pad") -> Indices:
    """The positions of the order that ``rank`` reads when ``cursor`` of them are done: int64 (n,).

    They are cursor + rank, cursor + rank + size, ... Where the rest does not divide by ``size``,
    "pad" goes on from the beginning of the order until all ranks have as many, "drop" leaves the
    tail out, and "exact" reads each position once, so that ranks may differ by one.
    """
    count = share_size(length, cursor, rank, size, uneven)
    positions = cursor + rank + size * np.arange(count, dtype=np.int64)
    return positions % length if uneven == "pad" and count else positions


def share_size(length: int, cursor: int, rank: int, size: int, uneven: Uneven = "pad") -> int:
    """How many positions ``share`` holds. Raises ``DataError`` for arguments that make no sense."""
    if uneven not in get_args(Uneven):
        raise DataError(f"uneven={uneven!r}: expected one of {', '.join(get_args(Uneven))}")
    if not 0 <= rank < size:
        raise DataError(f"found rank {rank} of {size}, expected 0 <= rank < size")
    if not 0 <= cursor <= length:
        raise DataError(f"found the cursor {cursor}, expected one within 0..{length}")
    rest = length - cursor
    if uneven == "pad":
        return -(-rest // size)
    if uneven == "drop":
        return rest // size
    return max(0, -(-(rest - rank) // size))


def advance(length: int, cursor: int, consumed: int, size: int) -> int:
    """The cursor after every rank consumed ``consumed`` samples from ``cursor`` on."""
    return min(length, cursor + consumed * size)
