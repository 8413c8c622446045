"""Starting and stopping a front door's Horovod with the watch over its waits.

A framework's name, Horovod's arguments and a limit go in; from then on no wait is without an end.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from hvdsync.comm import failures, horovod, launch, world
from hvdsync.guard.watch import limit, rendezvous
from hvdsync.guard.watch.endings import Ending
from hvdsync.guard.watch.exits import Exits, leave_windows
from hvdsync.guard.watch.hub import Hub
from hvdsync.guard.watch.member import Member
from hvdsync.guard.watch.pending import Pending

logger = logging.getLogger(__name__)

# Horovod's own limit ends the waits of all ranks and says no more than their names.
_OWN_LIMIT = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"


class Watch:
    """The watch of this process, from its making until :meth:`close`."""

    def __init__(self, basics: Any, seconds: float) -> None:
        comm = world.current()
        rank, size = comm.rank, comm.size
        one_host = comm.local_size == size
        self._hub = Hub(size, seconds, one_host=one_host) if rank == 0 else None
        said = None
        if self._hub is not None:
            said = {**self._hub.invitation(), "limit": seconds}
        heard = rendezvous.tell_all(basics, rank, size, said)
        if heard is None:
            logger.debug("rank %d: no way to tell ranks where rank 0 listens", rank)
        else:
            seconds = heard["limit"]  # one for all: that of rank 0
        self.seconds = seconds
        self._member = Member(rank, size, seconds, Pending(basics), basics.shutdown, heard)
        self._exits = Exits(self._member)
        failures.explain_with(self._exits.explain, self._member.has_ended)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends with ``error``."""
        self._exits.fail(error)

    def close(self) -> None:
        """Say goodbye, shut Horovod down, and leave the process's ways out as they were."""
        if self._member.is_well:
            leave_windows()
        failures.explain_with(None)
        self._exits.remove()
        self._member.say_end(Ending(self._member.rank, "finished"))
        self._member.shut_down()
        self._member.close()
        if self._hub is not None:
            self._hub.close()


_active: Watch | None = None


def start(framework: str, *args: Any, wait_limit: float | None = None, **kwargs: Any) -> None:
    """Initialise Horovod as :func:`hvdsync.comm.horovod.start` does, and watch over its waits.

    ``wait_limit``: seconds; see :func:`hvdsync.guard.watch.limit.resolve`. An elastic job goes on
    without the rank that does not come, and a Horovod of another build cannot be watched: for both
    Horovod's own limit is set and nothing else.
    """
    global _active
    seconds = limit.resolve(wait_limit)
    basics = horovod.load(framework).mpi_ops._basics
    watched = Pending.can_be_read(basics) and not launch.is_elastic()
    if seconds and not watched:
        # Kept, because every new world of an elastic job reads it.
        os.environ.setdefault(_OWN_LIMIT, str(max(1, round(seconds))))
    horovod.start(framework, *args, **kwargs)
    if watched and _active is None and world.current().size > 1:
        _active = Watch(basics, seconds)


def stop(framework: str) -> None:
    """Shut Horovod down, and end the watch; the process is a world of one afterwards."""
    global _active
    if _active is not None:
        _active.close()
        _active = None
    horovod.stop(framework)


def wait_limit() -> float:
    """Seconds that this rank may wait for another; 0 is no limit."""
    return limit.resolve(None) if _active is None else _active.seconds


def is_active() -> bool:
    """Whether other ranks are told how this one ends."""
    return _active is not None


def fail(error: BaseException) -> None:
    """Tell the other ranks that this one ends with ``error``, which nobody will see uncaught."""
    if _active is not None:
        _active.fail(error)
