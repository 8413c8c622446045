"""Who reads what where there is no index: files or a stream in, the part of this rank and of this
loader worker out. Nothing travels; all must be given the same files, or see the same stream."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, get_args

from hvdsync.comm import launch, world
from hvdsync.data.order import Uneven, global_order, share
from hvdsync.errors import DataError

T = TypeVar("T")
FileT = TypeVar("FileT", str, os.PathLike[str])


def shard_files(
    files: Sequence[FileT],
    epoch: int = 0,
    shuffle: bool = True,
    seed: int = 0,
    uneven: Uneven = "exact",
    *,
    rank: int | None = None,
    size: int | None = None,
) -> list[FileT]:
    """The files that this rank, or this loader worker of it, reads in ``epoch``.

    The list is sorted, so that its order on disk does not matter, then shuffled by (seed, epoch)
    alike on all ranks, and dealt out to ranks x workers. Each file is read once with
    ``uneven="exact"``; "pad" gives all equally many by reading some twice, "drop" by leaving some
    out. Inside a PyTorch ``DataLoader`` worker the part is the worker's own.

    Arguments:
        files: the whole list, the same on all ranks.
        rank, size: default those of the run.

    Raises :class:`DataError` for doubled files, or fewer files than readers with "drop".
    """
    ordered = sorted(files, key=os.fspath)
    for one, other in itertools.pairwise(ordered):
        if os.fspath(one) == os.fspath(other):
            raise DataError(f"file {one} is in the list twice; each file must be there once")
    position, readers = _reader(rank, size)
    if uneven == "drop" and len(ordered) < readers:
        raise DataError(
            f"found {len(ordered)} files for {readers} readers (ranks x loader workers), expected "
            "one each at least; use fewer workers, or uneven='exact'"
        )
    order = global_order(len(ordered), seed, epoch, shuffle)
    return [ordered[i] for i in order[share(len(ordered), 0, position, readers, uneven)]]


def worker_shard(
    stream: Iterable[T],
    uneven: Uneven = "exact",
    *,
    rank: int | None = None,
    size: int | None = None,
) -> Iterator[T]:
    """Every n-th element of the stream, n being ranks x loader workers, from this one's place on.

    For an ``IterableDataset``, whose ``__iter__`` runs in each loader worker of each rank: without
    it each of them yields all elements. ``uneven`` is about the last round, when elements are left
    for some readers only: "exact" gives them to these, "pad" fills up with the first elements of
    the stream, "drop" leaves them out.

    Every reader goes through the whole stream, and "pad" and "drop" hold one round in memory; where
    elements are costly to make, shard what they are made from (:func:`shard_files`).

    ``rank`` and ``size`` default to those of the run. Raises :class:`DataError` for an unknown
    policy.
    """
    if uneven not in get_args(Uneven):
        raise DataError(f"uneven={uneven!r}: expected one of {', '.join(get_args(Uneven))}")
    position, readers = _reader(rank, size)
    if uneven == "exact":
        return itertools.islice(stream, position, None, readers)
    return _whole_rounds(stream, position, readers, pad=uneven == "pad")


def _whole_rounds(stream: Iterable[T], position: int, readers: int, pad: bool) -> Iterator[T]:
    elements = iter(stream)
    first: list[T] | None = None
    while round_ := list(itertools.islice(elements, readers)):
        first = round_ if first is None else first
        if len(round_) == readers:
            yield round_[position]
        elif pad:
            filled = itertools.chain(round_, itertools.cycle(first))
            yield next(itertools.islice(filled, position, None))


def _reader(rank: int | None, size: int | None) -> tuple[int, int]:
    """Which reader this is, and of how many. Neighbours are ranks: the rest spreads over them."""
    if (rank is None) != (size is None):
        raise DataError(f"found rank={rank} and size={size}, expected both or neither")
    worker, workers = _loader_worker()
    if rank is None or size is None:
        rank, size = _place()
    return worker * size + rank, workers * size


def _loader_worker() -> tuple[int, int]:
    # PyTorch is asked only where it is in use.
    torch: Any = sys.modules.get("torch.utils.data")
    info = None if torch is None else torch.get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def _place() -> tuple[int, int]:
    started = launch.detect()
    if not world.is_active() and _loader_worker() != (0, 1) and started is not None:
        # A worker that was spawned knows of no init, but has the launcher's variables.
        return started.rank, started.size
    here = world.current()
    return here.rank, here.size
