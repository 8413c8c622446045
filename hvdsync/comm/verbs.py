"""The verbs that all front doors share, written once upon the active communicator.

Python values of each rank go in, one agreed value comes out on every rank.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import cloudpickle
import numpy as np

from hvdsync.comm import world
from hvdsync.errors import HvdsyncError, RankMismatch

# What a front door passes on as it is; the two for objects get its own signature there.
__all__ = [
    "agree_all",
    "agree_any",
    "average_metrics",
    "cross_rank",
    "cross_size",
    "local_rank",
    "local_size",
    "loss_scale",
    "rank",
    "rank_zero_first",
    "rank_zero_only",
    "size",
]

F = TypeVar("F", bound=Callable[..., Any])


def rank() -> int:
    """Index of this process among all, from 0; 0 when nothing was launched."""
    return world.current().rank


def size() -> int:
    """Number of processes in the run; 1 when nothing was launched."""
    return world.current().size


def local_rank() -> int:
    """Index of this process among those of its host; the usual choice of a GPU."""
    return world.current().local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return world.current().local_size


def cross_rank() -> int:
    """Index of this host among those that have a process of this local rank."""
    return world.current().cross_rank


def cross_size() -> int:
    """Number of hosts that have a process of this local rank."""
    return world.current().cross_size


def agree_any(flag: bool) -> bool:
    """True on every rank when ``flag`` is true on at least one. One all-reduce of 4 bytes."""
    return _agree(flag, "max")


def agree_all(flag: bool) -> bool:
    """True on every rank when ``flag`` is true on all of them. One all-reduce of 4 bytes."""
    return _agree(flag, "min")


def _agree(flag: bool, op: Any) -> bool:
    comm = world.current()
    if comm.size == 1:
        return bool(flag)
    verdict = comm.allreduce(np.array([bool(flag)], np.int32), op, f"hvdsync.agree.{op}")
    return bool(verdict[0])


def average_metrics(metrics: Mapping[str, Any], weight: float = 1) -> dict[str, float]:
    """Weighted mean of each metric over ranks: ``sum(weight * value) / sum(weight)``.

    ``weight`` is usually the number of samples behind this rank's values; a rank with weight 0
    does not count, whatever its values. Computed in float64, in rank order, so that every rank
    gets the same bits. One all-gather of 8 bytes per metric and rank.

    Raises :class:`RankMismatch` on every rank when the names differ between ranks, and
    ``ValueError`` on every rank when all weights are 0.
    """
    comm = world.current()
    names = sorted(metrics)
    fingerprint = zlib.crc32("\0".join(names).encode())
    record = np.array(
        [len(names), weight, fingerprint, *(float(metrics[name]) for name in names)], np.float64
    )
    records = _split_records(
        record if comm.size == 1 else comm.allgather(record, "hvdsync.average_metrics")
    )
    if any(other[2] != fingerprint for other in records):
        _raise_metric_mismatch(names)
    total = sum(other[1] for other in records)
    if total == 0:
        raise ValueError("average_metrics: the weights of all ranks are 0, so there is no mean")
    counted = [other for other in records if other[1] != 0]
    return {
        name: float(sum(other[1] * other[3 + i] for other in counted) / total)
        for i, name in enumerate(names)
    }


def _split_records(gathered: np.ndarray) -> list[np.ndarray]:
    records, start = [], 0
    while start < len(gathered):
        end = start + 3 + int(gathered[start])
        records.append(gathered[start:end])
        start = end
    return records


def _raise_metric_mismatch(names: Sequence[str]) -> None:
    everyone = allgather_object(list(names), name="hvdsync.average_metrics.names")
    listing = "; ".join(f"rank {r}: {', '.join(n) or 'none'}" for r, n in enumerate(everyone))
    raise RankMismatch(
        f"average_metrics was given different metrics on different ranks ({listing}); "
        "give the same names everywhere, with weight=0 where a rank has no value"
    )


def loss_scale(weight: float) -> float:
    """Factor for this rank's mean loss when ranks hold different numbers of samples (or tokens).

    ``(loss * loss_scale(n)).backward()`` on every rank, with gradients averaged over ranks, gives
    the gradient of the mean over all samples: the factor is ``n * ranks / sum of n``. One
    all-reduce of 8 bytes. Raises ``ValueError`` on every rank when all weights are 0.
    """
    comm = world.current()
    if comm.size == 1:
        total = float(weight)
    else:
        local = np.array([weight], np.float64)
        total = float(comm.allreduce(local, "sum", "hvdsync.loss_scale")[0])
    if total == 0:
        raise ValueError("loss_scale: the weights of all ranks are 0, so there is no mean")
    return float(weight) * comm.size / total


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None
) -> Any:
    """The object of rank ``root_rank``, on every rank (stands for Horovod's ``broadcast_object``).

    Pickled by cloudpickle: its length travels first (8 bytes), then its bytes.
    """
    comm = world.current()
    if comm.size == 1:
        return obj
    label = name or "hvdsync.broadcast_object"
    at_root = comm.rank == root_rank
    payload = np.frombuffer(cloudpickle.dumps(obj), np.uint8) if at_root else np.empty(0, np.uint8)
    length = comm.broadcast(
        np.array([len(payload)], np.int64), root_rank, f"{label}.length", process_set
    )
    if not at_root:
        payload = np.empty(int(length[0]), np.uint8)
    payload = comm.broadcast(payload, root_rank, f"{label}.bytes", process_set)
    return obj if at_root else cloudpickle.loads(payload.tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """The objects of all ranks in rank order (stands for Horovod's ``allgather_object``).

    Pickled by cloudpickle: the lengths travel first (8 bytes a rank), then the bytes.
    """
    comm = world.current()
    if comm.size == 1:
        return [obj]
    label = name or "hvdsync.allgather_object"
    payload = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    lengths = comm.allgather(np.array([len(payload)], np.int64), f"{label}.lengths", process_set)
    gathered = comm.allgather(payload, f"{label}.bytes", process_set)
    ends = np.cumsum(lengths)
    return [
        cloudpickle.loads(gathered[end - length : end].tobytes())
        for end, length in zip(ends, lengths, strict=True)
    ]


def raise_on_all(failure: Exception | None, what: str, name: str | None = None) -> None:
    """Collective: raise on every rank when any has a ``failure``; one :func:`allgather_object`.

    Its own on a rank that has one; elsewhere :class:`HvdsyncError`: ``what`` cannot be done, and
    which ranks failed with what.
    """
    told = allgather_object(failure and repr(failure), name or "hvdsync.raise_on_all")
    if failure is not None:
        raise failure
    listing = "; ".join(f"rank {r}: {text}" for r, text in enumerate(told) if text is not None)
    if listing:
        raise HvdsyncError(f"rank {rank()}: {what} ({listing})")


def rank_zero_only(function: F) -> F:
    """Decorator: the function runs on rank 0 alone and gives None on the others.

    Nothing travels. Never put a collective inside: the other ranks would not come to it.
    """

    @functools.wraps(function)
    def on_rank_zero(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if world.current().rank == 0 else None

    return on_rank_zero  # type: ignore[return-value]


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """Context whose body runs on the first rank of each host before the others of that host.

    For downloads and caches: one rank fetches, the rest find it done. One all-reduce of 4 bytes
    passes the word on. When a first rank fails, its error goes on and every other rank raises
    :class:`HvdsyncError` instead of waiting for it.
    """
    comm = world.current()
    first = comm.local_rank == 0
    if not first:
        if agree_any(False):
            raise HvdsyncError(
                f"rank {comm.rank}: the first rank of a host failed inside rank_zero_first(); "
                "its own traceback says why"
            )
        yield
        return
    try:
        yield
    except BaseException:
        agree_any(True)
        raise
    if agree_any(False):
        raise HvdsyncError(
            f"rank {comm.rank}: the first rank of another host failed inside rank_zero_first(); "
            "its own traceback says why"
        )
