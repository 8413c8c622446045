"""Collectives of this rank that Horovod does not know of, from their start to their end.

Who watches over waits lists them beside Horovod's own.
"""

from __future__ import annotations

import time

_started: dict[str, float] = {}


def begin(name: str) -> None:
    """This rank has given its part."""
    _started[name] = time.monotonic()


def end(name: str) -> None:
    """It has the result, or will not get it."""
    _started.pop(name, None)


def listed() -> list[tuple[str, float]]:
    """(Name, seconds since its start) of each."""
    now = time.monotonic()
    return [(name, now - started) for name, started in list(_started.items())]
