"""An error of one rank becomes one of all: an action in, its result or the same error out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hvdsync.errors import HvdsyncError

T = TypeVar("T")


class AgreedError(HvdsyncError):
    """An error that every rank raises together, with one text: one of them may tell it."""


def together(action: Callable[[], T]) -> T:
    """What ``action`` gives, or :class:`AgreedError` on every rank when it failed on any.

    The text is that of the first rank whose ``action`` raised an :class:`HvdsyncError` or an
    ``OSError``; other errors pass through. Collectives inside ``action`` must fail on all ranks or
    on none. One all-gather.
    """
    from hvdsync.comm import verbs  # brings NumPy, whose threads are capped before it is imported

    failure: Exception | None = None
    try:
        result = action()
    except (HvdsyncError, OSError) as error:
        failure = error
    texts = verbs.allgather_object(failure and str(failure), "hvdsync.train.together")
    text = next((text for text in texts if text is not None), None)
    if text is not None:
        raise AgreedError(text) from failure
    return result
