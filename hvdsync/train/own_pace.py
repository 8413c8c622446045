"""Ranks that step at their own pace, and when all are at one step: a step in, a verdict out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Shared(Protocol):
    """What the ranks tell one another without waiting; see ``hvdsync.sync.asynchronous``."""

    @property
    def called(self) -> bool:
        """Whether any rank has called for a meeting."""

    def call(self) -> None:
        """Call for one."""

    def meet(self, number: int) -> list[int]:
        """Wait for all ranks; what each came with."""


class OwnPace:
    """Brings ranks to one step where one of them wishes it, or where all have something to do.

    ``wishes`` says whether this rank does. The others hear of it after the step at hand; who is
    behind catches up with the furthest, and who is ahead waits there. Without a wish no rank waits.
    """

    def __init__(self, wishes: Callable[[], bool]) -> None:
        self._wishes = wishes
        self._goal: int | None = None

    def all_are_here(self, step: int, shared: Shared, *, meets: bool) -> bool:
        """Whether all ranks have made ``step`` steps now, to be asked after each; all get one True.

        At a step that ``meets``, alike on all ranks, the answer is True on each.
        """
        if self._goal is None:
            if self._wishes():
                shared.call()
            if not (meets or shared.called):
                return False
            steps = shared.meet(step)
            if min(steps) == max(steps):
                return True
            self._goal = max(steps)
        if step < self._goal:
            return False
        shared.meet(step)
        self._goal = None
        return True
