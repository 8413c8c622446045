"""Memory that all ranks of one host have in common: a number of bytes in, each rank's piece out.

Anonymous memory of rank 0 (Linux), which the others map too: it has no name in any folder, counts
against no limit of ``/dev/shm``, and is gone with the last process that has mapped it.
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from hvdsync.comm import launch, verbs, world

logger = logging.getLogger(__name__)

#: Set to 0 to have all ranks talk as ranks of several hosts do.
SWITCH = "HVDSYNC_HOST_MEMORY"

_TOKEN_BYTES = 16


@dataclass(frozen=True)
class _Invitation:
    """Where rank 0 keeps the memory, and what is written at its beginning."""

    path: str
    token: bytes


class HostMemory:
    """A piece of equal length for each rank, all of which every rank reads and may write."""

    def __init__(self, mapping: mmap.mmap, ranks: int, length: int) -> None:
        whole = np.frombuffer(mapping, np.uint8)[mmap.PAGESIZE :]
        self.pieces = list(whole.reshape(ranks, length))


def may_be_shared() -> bool:
    """Whether memory in common can be tried; without a word to other ranks.

    Plain loads and stores order what ranks write and read, as x86 processors keep them.
    """
    return (
        sys.platform == "linux"
        and platform.machine() in ("x86_64", "AMD64")
        and 1 < world.current().size == world.current().local_size
        and not launch.is_elastic()
    )


def share(length: int) -> HostMemory | None:
    """Memory with ``length`` bytes for each rank, zeros at first; collective.

    None on every rank where any cannot have it: they are in containers or on hosts of their own,
    there is not so much memory, or the environment of any has ``HVDSYNC_HOST_MEMORY=0``. On the
    wire: one broadcast of a path and one agreement.
    """
    comm = world.current()
    length = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    total = mmap.PAGESIZE + comm.size * length
    with _own_memory(total, asked=comm.rank == 0) as own:
        invitation = verbs.broadcast_object(None if own is None else own[1], 0, "hvdsync.memory")
        mapping = own[0] if own is not None else _join(invitation, total)
        if os.environ.get(SWITCH) == "0":
            mapping = None
        if not verbs.agree_all(mapping is not None):
            logger.debug("rank %d: ranks have no memory in common", comm.rank)
            return None
    assert mapping is not None
    return HostMemory(mapping, comm.size, length)


@contextmanager
def _own_memory(total: int, *, asked: bool) -> Iterator[tuple[mmap.mmap, _Invitation] | None]:
    """Rank 0's memory, which can be joined within this context; None where it is not to be had."""
    if not asked:
        yield None
        return
    descriptor = None
    try:
        try:
            descriptor = os.memfd_create("hvdsync")
            # All of it now: what is missing later ends the process.
            os.posix_fallocate(descriptor, 0, total)
            mapping = mmap.mmap(descriptor, total)
        except OSError as error:
            logger.debug("rank 0: no memory of %d bytes: %s", total, error)
            yield None
            return
        token = os.urandom(_TOKEN_BYTES)
        mapping[:_TOKEN_BYTES] = token
        yield mapping, _Invitation(f"/proc/{os.getpid()}/fd/{descriptor}", token)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _join(invitation: _Invitation | None, total: int) -> mmap.mmap | None:
    """The memory behind an invitation; None where this process does not see that memory."""
    if invitation is None:
        return None
    try:
        descriptor = os.open(invitation.path, os.O_RDWR)
        try:
            mapping = mmap.mmap(descriptor, total)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        logger.debug("rank %d: rank 0's memory is not here: %s", world.current().rank, error)
        return None
    # In another container the same path may be another process's.
    return mapping if mapping[:_TOKEN_BYTES] == invitation.token else None
