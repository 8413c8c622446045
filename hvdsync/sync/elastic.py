"""Elastic training of TensorFlow and Keras: variables go in, their last committed values come back.

Written once for both front doors; how Horovod is started anew is handed in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError

from hvdsync.comm import verbs
from hvdsync.errors import NonFiniteGradient
from hvdsync.sync.variables import VariablesMemory, broadcast_through_host


class VariablesState(ObjectState):
    """Variables, and plain attributes given as keywords, with the verbs save, restore and sync.

    ``listed()`` gives the variables, in an order that is the same on all ranks.
    """

    def __init__(self, listed: Callable[[], Sequence[Any]], **kwargs: Any) -> None:
        self._listed = listed
        self._memory = VariablesMemory(listed)
        super().__init__(bcast_object=verbs.broadcast_object, get_rank=verbs.rank, **kwargs)

    def save(self) -> None:
        """Copy variables and attributes to memory. Nothing travels."""
        self._memory.save()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last. Nothing travels."""
        self._memory.restore()
        super().restore()

    def sync(self) -> None:
        """Give every rank the state of rank 0, and save it. Collective."""
        broadcast_through_host(list(self._listed()), 0)
        self._memory.save()
        super().sync()


def run(
    func: Callable[..., Any],
    reset: Callable[[], None],
    as_lost_rank: Callable[[BaseException], HorovodInternalError | None],
) -> Callable[..., Any]:
    """``func`` under Horovod's elastic loop: run again after each loss, from the last commit.

    ``as_lost_rank`` tells a framework's error of a failed collective from any other.
    """

    @functools.wraps(func)
    def guarded(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except Exception as error:
            lost = as_lost_rank(error)
            if lost is None:
                raise
            raise lost from error

    return run_fn(guarded, reset)


def tensorflow_lost_rank(tf: ModuleType, error: BaseException) -> HorovodInternalError | None:
    """The error that elastic training recovers from, if this one says that a collective failed."""
    if NonFiniteGradient.__name__ in str(error):
        return None
    if isinstance(error, tf.errors.UnknownError | tf.errors.AbortedError) and any(
        mark in error.message for mark in ("Horovod", "horovod", ".bucket", "hvdsync.")
    ):
        return HorovodInternalError(error)
    return None
