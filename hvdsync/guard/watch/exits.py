"""The ways out of a rank's process: uncaught errors and the script's end are told to all ranks."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from types import TracebackType

from hvdsync.comm import windows
from hvdsync.errors import HvdsyncError, RankFailed, StalledRank
from hvdsync.guard.watch.endings import Ending
from hvdsync.guard.watch.member import Member

logger = logging.getLogger(__name__)

# What Horovod and what is below it say when another rank has gone.
_LOST = (
    "Horovod has been shut down",
    "Horovod has not been initialized",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "gloo/",
    "MPI_",
)


def is_of_a_lost_rank(error: BaseException) -> bool:
    """Whether an error says that a collective failed because ranks can no longer talk."""
    # The system's own errors are of the user's files and connections.
    return not isinstance(error, OSError) and any(mark in str(error) for mark in _LOST)


class Exits:
    """Takes part in this process's end, from its making until :meth:`remove`."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._pid = os.getpid()
        self._previous = sys.excepthook
        sys.excepthook = self._on_uncaught
        atexit.register(self._on_exit)

    def remove(self) -> None:
        """Leave the process's end as it was, unless others have built upon this."""
        atexit.unregister(self._on_exit)
        if sys.excepthook == self._on_uncaught:
            sys.excepthook = self._previous

    def explain(self, error: BaseException) -> HvdsyncError | None:
        """The reason for an error of a collective, in terms of ranks; None when it is another."""
        if not self._is_mine() or not is_of_a_lost_rank(error):
            return None
        return self._member.reason()

    def fail(self, error: BaseException) -> None:
        """This rank ends with ``error``: the others are told, unless it only follows them."""
        if self._is_mine() and self._followed(error) is None:
            self._member.say_end(Ending.of(self._member.rank, error))

    def _is_mine(self) -> bool:
        return os.getpid() == self._pid  # not that of a child by fork

    def _on_uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not self._is_mine():
            self._previous(kind, error, trace)
            return
        reason = self._followed(error)
        if reason is None:
            self._member.say_end(Ending.of(self._member.rank, error))
            self._previous(kind, error, trace)
        elif reason is error or is_of_a_lost_rank(error):
            # Forty lines of the runtime's own would only hide who was first.
            logger.critical("%s: %s", type(reason).__name__, reason)
        else:
            self._previous(kind, error, trace)

    def _followed(self, error: BaseException) -> BaseException | None:
        """The reason in terms of ranks, if ``error`` or what it came from is of a lost rank."""
        for one in _chain(error):
            if isinstance(one, StalledRank | RankFailed):
                return one
            if is_of_a_lost_rank(one):
                return self._member.reason()
        return None

    def _on_exit(self) -> None:
        if not self._is_mine():
            return
        # Set also where another hook has taken the place of the one here.
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.fail(error)
        elif self._member.is_well:
            leave_windows()
        self._member.let_the_first_go_first()
        self._member.say_end(Ending(self._member.rank, "finished"))
        self._member.shut_down()


def leave_windows() -> None:
    """Let all ranks have done with one another's memory; they may still be reading this one's."""
    try:
        windows.before_leaving()
    except Exception as error:  # another rank has ended, and cannot come
        logger.debug("left without the other ranks: %s", error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
