"""Where this process's time goes: marked parts of the program in, seconds of each kind so far out.

What the training thread does not mark is its own computation.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, Protocol, TypeVar

Kind = Literal["data", "stalled", "checkpoint"]
F = TypeVar("F", bound=Callable[..., Any])


class Waiting(Protocol):
    """What counts itself how long it stood still for other ranks: buckets, and graphs."""

    @property
    def waited_seconds(self) -> float:
        """Seconds so far."""


class _Nesting(threading.local):
    def __init__(self) -> None:
        self.inner = 0.0


_spent: dict[Kind, float] = {"data": 0.0, "stalled": 0.0, "checkpoint": 0.0}
_nesting = _Nesting()
_counting: weakref.WeakSet[Waiting] = weakref.WeakSet()


class spend:
    """Context, or decorator, whose time is of this kind, less what is marked inside of it.

    "data" is waiting for a batch, "stalled" is standing still in a collective, "checkpoint" is
    saving. About a microsecond.
    """

    def __init__(self, kind: Kind) -> None:
        self._kind: Kind = kind

    def __enter__(self) -> None:
        self._outer, _nesting.inner = _nesting.inner, 0.0
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        taken = time.perf_counter() - self._started
        _spent[self._kind] += taken - _nesting.inner
        _nesting.inner = self._outer + taken

    def __call__(self, function: F) -> F:
        kind = self._kind

        @wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            with spend(kind):
                return function(*args, **kwargs)

        return marked  # type: ignore[return-value]


def add(kind: Kind, seconds: float) -> None:
    """Count seconds that were measured otherwise."""
    _spent[kind] += seconds


def include(waiting: Waiting) -> None:
    """Take the ``waited_seconds`` of this object in as stalled, for as long as it lives."""
    _counting.add(waiting)


def spent() -> tuple[float, float, float]:
    """Seconds so far: data, stalled, checkpoint."""
    counted = sum(waiting.waited_seconds for waiting in list(_counting))
    return _spent["data"], _spent["stalled"] + counted, _spent["checkpoint"]
