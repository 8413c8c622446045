"""The ``torch.distributed`` member of ``comm``: Gloo between CPUs, NCCL between GPUs.

A place among ranks goes in; an active ``ProcessGroupCommunicator`` comes out.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import psutil

from hvdsync.comm import clock, failures, runtime_threads, world
from hvdsync.comm.communicator import Communicator, ReduceOp
from hvdsync.comm.comparison import installation, note
from hvdsync.comm.meeting import Place, find_place, open_store
from hvdsync.errors import HvdsyncError, LaunchError, RankFailed, StalledRank

logger = logging.getLogger(__name__)

#: All ranks, for who outlives the process group: who holds that itself keeps its threads alive.
EVERYONE: Any = object()

_FOR_EVER = 10 * 365 * 86400.0

# What Gloo, NCCL and the store say when a rank did not come, and when one has gone.
_LATE = re.compile(r"[Tt]imed out|[Tt]imeout|wait timeout")
_LOST = re.compile(r"Connection (closed|reset|refused)|Broken pipe|Socket closed|[Aa]borted")


class ProcessGroupCommunicator(Communicator):
    """Host arrays over ``torch.distributed``.

    ``group`` of its methods is a ``torch.distributed.ProcessGroup``. Horovod's set of all ranks,
    the default of the front door's functions, is understood too.
    """

    def __init__(self, torch: Any, place: Place) -> None:
        self._torch = torch
        self._dist = torch.distributed
        self._rank, self._size = place.rank, place.size
        here = (socket.gethostname(), None if place.local is None else place.local[0])
        everyone: list[Any] = [None] * place.size
        self._dist.all_gather_object(everyone, here)
        self._local_size = sum(host == here[0] for host, _ in everyone)
        if place.local is not None:
            self._local_size = place.local[1]
        local_ranks = _local_ranks(everyone)
        self._local_rank = local_ranks[place.rank]
        self._cross_size = local_ranks.count(self._local_rank)
        self._cross_rank = local_ranks[: place.rank].count(self._local_rank)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def local_rank(self) -> int:
        return self._local_rank

    @property
    def local_size(self) -> int:
        return self._local_size

    @property
    def cross_rank(self) -> int:
        return self._cross_rank

    @property
    def cross_size(self) -> int:
        return self._cross_size

    def group(self, group: Any) -> Any:
        """The process group that ``group`` stands for; None is all ranks.

        Raises ``ValueError`` for a part of the ranks in Horovod's terms.
        """
        if group is None or group is EVERYONE or getattr(group, "process_set_id", None) == 0:
            return self._dist.group.WORLD
        if not isinstance(group, self._dist.ProcessGroup):
            raise ValueError(
                f"process_set is {group!r}, a set of Horovod's ranks; with engine='ddp' give a "
                "group that torch.distributed.new_group(ranks) made"
            )
        return group

    @clock.spend("stalled")
    def allreduce(
        self, array: np.ndarray, op: ReduceOp, name: str, group: Any = None
    ) -> np.ndarray:
        result = self._torch.from_numpy(array.copy())
        ops = self._dist.ReduceOp
        kind = {"sum": ops.SUM, "min": ops.MIN, "max": ops.MAX}[op]
        with failures.explained():
            self._dist.all_reduce(result, kind, self.group(group))
        return result.numpy()

    @clock.spend("stalled")
    def allgather(self, array: np.ndarray, name: str, group: Any = None) -> np.ndarray:
        torch, dist, members = self._torch, self._dist, self.group(group)
        mine = _bytes_of(array)
        lengths = torch.zeros(dist.get_world_size(members), dtype=torch.int64)
        with failures.explained():
            dist.all_gather(
                list(lengths.split(1)), torch.tensor([len(mine)], dtype=torch.int64), members
            )
            longest = int(lengths.max())
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(mine)] = torch.from_numpy(mine.copy())
            gathered = torch.empty((len(lengths), longest), dtype=torch.uint8)
            if longest:
                dist.all_gather(list(gathered.unbind()), padded, members)
        parts = [
            row[:length].numpy() for row, length in zip(gathered, lengths.tolist(), strict=True)
        ]
        return np.concatenate(parts).view(array.dtype).reshape(-1, *array.shape[1:])

    @clock.spend("stalled")
    def broadcast(self, array: np.ndarray, root: int, name: str, group: Any = None) -> np.ndarray:
        result = _bytes_of(array).copy()
        if len(result):
            with failures.explained():
                self._dist.broadcast(self._torch.from_numpy(result), root, self.group(group))
        return result.view(array.dtype).reshape(array.shape)

    @clock.spend("stalled")
    def barrier(self, group: Any = None) -> None:
        # Not the group's own, which on a machine with GPUs would meet there.
        self.allreduce(np.zeros(1, np.int32), "sum", "hvdsync.barrier", group)


def _local_ranks(everyone: list[tuple[str, int | None]]) -> list[int]:
    """Each rank's index on its host, where no launcher has told it: by order of ranks."""
    seen: dict[str, int] = {}
    result = []
    for host, told in everyone:
        index = seen.get(host, 0)
        seen[host] = index + 1
        result.append(index if told is None else told)
    return result


def _bytes_of(array: np.ndarray) -> np.ndarray:
    # Bits, so that any dtype can travel.
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def active() -> ProcessGroupCommunicator | None:
    """The communicator, if ``init(engine="ddp")`` made the world of this process."""
    communicator = world.current() if world.is_active() else None
    return communicator if isinstance(communicator, ProcessGroupCommunicator) else None


def start(
    *,
    wait_limit: float,
    backend: str | None = None,
    rank: int | None = None,
    size: int | None = None,
    master_address: str | None = None,
    master_port: int | None = None,
) -> None:
    """Start a process group of all ranks and make it the active communicator.

    ``backend`` is ``"nccl"`` (the default where CUDA is there) or ``"gloo"``. Host arrays travel
    over Gloo with both. ``wait_limit`` is in seconds, 0 for none. The rest is of
    :func:`hvdsync.comm.meeting.find_place`.

    Raises :class:`LaunchError` when the ranks do not find one another, and when a world or a
    process group is there already.
    """
    import torch

    if world.is_active():
        if active() is None:
            raise LaunchError(
                "init(engine='ddp'): this process runs Horovod already; call shutdown() first"
            )
        return
    if torch.distributed.is_initialized():
        raise LaunchError(
            "init(engine='ddp'): torch.distributed is initialised already; call "
            "torch.distributed.destroy_process_group() first, or leave its start to init()"
        )
    place = find_place(rank, size, master_address, master_port)
    seconds = wait_limit or _FOR_EVER
    with _one_interface(place), runtime_threads.noticed():
        _form(torch, place, _backends(torch, backend), seconds)
    failures.explain_with(_explanation)
    # Compared later, as in a world of Horovod.
    note("installed versions", installation("torch"))
    logger.debug("rank %d of %d is up", place.rank, place.size)


def stop() -> None:
    """Take the process group down; the process is a world of one afterwards."""
    import torch

    world.deactivate()
    runtime_threads.forget()
    failures.explain_with(None)
    torch.distributed.destroy_process_group()


def _form(torch: Any, place: Place, backends: str, seconds: float) -> None:
    limit = timedelta(seconds=seconds)
    store = open_store(torch, place, seconds)
    try:
        torch.distributed.init_process_group(
            backends, timeout=limit, store=store, rank=place.rank, world_size=place.size
        )
        world.activate(ProcessGroupCommunicator(torch, place))
    except RuntimeError as error:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        raise LaunchError(
            f"rank {place.rank} of {place.size}: the process group did not form: {error}"
        ) from error


def _backends(torch: Any, backend: str | None) -> str:
    if backend not in (None, "gloo", "nccl"):
        raise ValueError(f"init: backend is {backend!r}; expected 'gloo' or 'nccl'")
    has_nccl = torch.cuda.is_available() and torch.distributed.is_nccl_available()
    if backend == "nccl" and not has_nccl:
        raise LaunchError(
            "init(backend='nccl'): this PyTorch finds no CUDA device, or was built without NCCL; "
            "leave backend out, or give 'gloo'"
        )
    return "gloo" if backend == "gloo" or not has_nccl else "cpu:gloo,cuda:nccl"


@contextmanager
def _one_interface(place: Place) -> Iterator[None]:
    """Gloo's network interface while it starts: the loopback if all ranks are on this host.

    Otherwise the host's name decides, which in a container may stand for nothing.
    """
    name = "GLOO_SOCKET_IFNAME"
    loopback = next(
        (
            interface
            for interface, entries in psutil.net_if_addrs().items()
            if any(entry.address == "127.0.0.1" for entry in entries)
        ),
        None,
    )
    if name in os.environ or loopback is None or not (place.one_host or place.size == 1):
        yield
        return
    os.environ[name] = loopback
    try:
        yield
    finally:
        del os.environ[name]


def _explanation(error: BaseException) -> HvdsyncError | None:
    communicator = active()
    text = str(error).strip()
    if communicator is None or not isinstance(error, RuntimeError) or not text:
        return None
    here = f"rank {communicator.rank} of {communicator.size}"
    # Without advice that is not for who trains.
    said = text.splitlines()[0].split(". This is")[0]
    if _LATE.search(text):
        return StalledRank(
            f"{here}: a rank did not come to a collective operation within the limit ({said}); "
            "every rank must make the same calls in the same order. init(wait_limit=seconds) "
            "sets the limit"
        )
    if _LOST.search(text):
        return RankFailed(
            f"{here} cannot go on: a rank that it talks to has ended ({said}); that rank's own "
            "output says why"
        )
    return None
