"""Threads of the runtime that carries collectives: noticed while it starts, their numbers out.

What they do is communication, not this rank's own work: Horovod's goes round and round for as long
as any rank waits. Known where the system lists threads (Linux).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TASKS = "/proc/self/task"
_LOOK_SECONDS = 0.01
_known: frozenset[str] = frozenset()


@contextmanager
def noticed() -> Iterator[None]:
    """Context in which a runtime starts: threads that begin in it are the runtime's."""
    global _known
    before = running()
    yield
    _known |= running() - before


def known() -> frozenset[str]:
    """The numbers of the runtime's threads."""
    return _known


def settle(seconds: float = 1.0) -> None:
    """Wait until the runtime's threads sleep, so many seconds at most.

    Who has its result may be ahead of the thread that brought it, which still frees what it holds.
    It may need Python's lock for that, which this leaves to it meanwhile.
    """
    deadline = time.monotonic() + seconds
    quiet = 0
    # Twice, since one that waits for the lock sleeps, too.
    while _known and quiet < 2 and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        quiet = 0 if any(map(_runs, _known)) else quiet + 1


def _runs(thread: str) -> bool:
    try:
        state = Path(_TASKS, thread, "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state == "R"


def forget() -> None:
    """The runtime has ended."""
    global _known
    _known = frozenset()


def running() -> frozenset[str]:
    """The numbers of all threads of this process."""
    try:
        return frozenset(os.listdir(_TASKS))
    except OSError:
        return frozenset()
