"""What a failed collective says: a framework's error in, hvdsync's own out.

The Python of Horovod, as ``build-horovod`` installs it, asks here what an error means.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from hvdsync.comm import world
from hvdsync.errors import HvdsyncError, RankMismatch

# As the replacement in Horovod's controller writes it.
_MISMATCH = re.compile(r"Mismatched tensor '(?P<name>.*?)': (?P<values>[^\n]*?)\.(?:\s|$)")

_reason: Callable[[BaseException], HvdsyncError | None] | None = None
_has_ended: Callable[[int], bool] | None = None


def explain_with(
    reason: Callable[[BaseException], HvdsyncError | None] | None,
    has_ended: Callable[[int], bool] | None = None,
) -> None:
    """From now on ``reason`` is asked for errors that say nothing of themselves; None: nobody is.

    It gives hvdsync's own error, or None where it knows none. ``has_ended`` says of a rank whether
    it will not come to any collective any more.
    """
    global _reason, _has_ended
    _reason, _has_ended = reason, has_ended


def has_ended(rank: int) -> bool:
    """Whether this rank is known not to come to any collective any more."""
    return _has_ended is not None and _has_ended(rank)


def of_waiting_for(
    rank: int, error: BaseException, *, is_initialized: bool
) -> BaseException | None:
    """The error of who waits for a rank that will not come; None where it may come yet.

    ``error`` is the framework's own, for which hvdsync's stands where there is one.
    """
    if is_initialized and not has_ended(rank):
        return None
    return explain(error) or error


def explain(error: BaseException) -> HvdsyncError | None:
    """hvdsync's own error in the place of ``error``, or None when there is nothing to add.

    Ranks that gave one name different shapes, dtypes, operations, reductions, roots or devices
    each get a :class:`RankMismatch` with the name, the values and the ranks. Ranks that lost
    another, or waited too long for it, get what :func:`explain_with` was given to say.
    """
    found = None if isinstance(error, HvdsyncError) else _MISMATCH.search(str(error))
    if found is None:
        own = _reason(error) if _reason is not None else None
        return None if own is None else _instead_of(error, type(own), str(own), vars(own))
    who = f"rank {world.current().rank}: " if world.is_active() else ""
    return _instead_of(
        error,
        RankMismatch,
        f"{who}ranks disagree about the tensor '{found['name']}': {found['values']}; expected "
        "the same on every rank. Look at what each of them gives under this name",
        {},
    )


def _instead_of(
    error: BaseException, kind: type[HvdsyncError], message: str, more: Mapping[str, Any]
) -> HvdsyncError:
    made = _both(kind, type(error))(message)
    # A framework's handlers read what its own error carries.
    vars(made).update({**vars(error), **more})
    # The error in whose handling this one is raised says the same in other words.
    made.__suppress_context__ = True
    return made


def _both(kind: type[HvdsyncError], other: type[BaseException]) -> Any:
    """A class for who catches hvdsync's error and for who catches the framework's."""

    def start(self: BaseException, message: str) -> None:
        self.args = (message,)

    def text(self: BaseException) -> str:
        return str(self.args[0])

    names: dict[str, Any] = {"__init__": start, "__str__": text, "__module__": kind.__module__}
    return type(kind.__name__, (kind, other), names)


class explained:
    """Context out of which errors of collectives come as :func:`explain` has them."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        own = explain(error) if isinstance(error, Exception) else None
        if own is not None:
            raise own from None


class Explained:
    """A module of operations whose errors come out as :func:`explain` has them."""

    def __init__(self, operations: Any) -> None:
        self._operations = operations

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._operations, name)
        if not callable(operation):
            return operation

        @functools.wraps(operation)
        def run(*args: Any, **kwargs: Any) -> Any:
            with explained():
                return operation(*args, **kwargs)

        # TensorFlow is not to rewrite what is called while it traces a function, or to warn of it.
        run.autograph_info__ = {}  # type: ignore[attr-defined]
        # Found at once from now on.
        setattr(self, name, run)
        return run
