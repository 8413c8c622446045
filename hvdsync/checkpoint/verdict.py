"""One verdict for all ranks: an action in, its result out everywhere, or its failure everywhere.

A rank that fails alone must not leave the others waiting, or training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hvdsync.comm import verbs, world
from hvdsync.errors import CheckpointError, HvdsyncError


def on_rank_zero(
    action: Callable[[], Any], *, tell: Callable[[Any], Any], name: str
) -> tuple[Any, Any]:
    """Run ``action`` on rank 0: (its result there, else None), and ``tell`` of it on every rank.

    What it raises is raised on every rank: on rank 0 itself, elsewhere as its message.
    """
    result, told, failure = None, None, None
    if world.current().rank == 0:
        try:
            result = action()
            told = tell(result)
        except HvdsyncError as error:
            failure = error
        except Exception as error:  # whatever it is, the other ranks wait for the verdict
            failure = CheckpointError(f"checkpoint {name} failed: {error!r}")
            failure.__cause__ = error
    message = None if failure is None else str(failure)
    told, message = verbs.broadcast_object((told, message), 0, f"hvdsync.checkpoint.{name}")
    if failure is not None:
        raise failure
    if message is not None:
        raise CheckpointError(f"on rank 0: {message}")
    return result, told


def on_every_rank(action: Callable[[], None], what: str) -> None:
    """Run ``action`` on every rank; raises on all of them when ``what`` did not fit one."""
    failure = None
    try:
        action()
    except Exception as error:
        failure = CheckpointError(f"rank {world.current().rank}: {what} does not fit {error}")
        failure.__cause__ = error
    failed_somewhere = verbs.agree_any(failure is not None)
    if failure is not None:
        raise failure
    if failed_somewhere:
        raise CheckpointError(
            f"rank {world.current().rank}: another rank could not use {what}; its own message "
            "says why"
        )


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Put the name of an object in front of what is raised inside."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(f"{name!r}: {error}") from error
