"""Threads of the runtime that carries collectives: noticed while it starts, their numbers out.

What they do is communication, not this rank's own work: Horovod's goes round and round for as long
as any rank waits. Known where the system lists threads (Linux).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_TASKS = "/proc/self/task"
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
