"""``Guard``: called once per step, it compares replicas every so many steps, and ends or mends.

How state is listed, and how it is spread from one rank, comes in from a front door.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from hvdsync.comm import verbs, world
from hvdsync.guard import replicas
from hvdsync.guard.fingerprints import Entry, without

logger = logging.getLogger(__name__)


class Guard:
    """Compares replicas while they train, and ends the run or mends them when they differ.

    Arguments:
        every: compare at every so many calls of :meth:`check`; the cost of a comparison is about
            that of reading model and optimizer state once.
        on_divergence: ``"raise"`` raises ``ReplicaMismatch`` on every rank. ``"repair"`` gives
            every rank the model and optimizer state of the lowest rank of the majority, and rank
            0 logs a warning that names tensor and ranks.
        ignore: shell patterns of names that are not compared, such as ``"*running_*"``.

    Raises ``ValueError`` for other values.
    """

    def __init__(
        self,
        every: int = 100,
        on_divergence: Literal["raise", "repair"] = "raise",
        *,
        ignore: Sequence[str] = (),
    ) -> None:
        if every < 1:
            raise ValueError(f"Guard: every is {every}, expected a number of steps from 1 up")
        if on_divergence not in ("raise", "repair"):
            raise ValueError(
                f"Guard: on_divergence is {on_divergence!r}, expected 'raise' or 'repair'"
            )
        self.every = every
        self.on_divergence = on_divergence
        self.ignore = ignore
        self.repairs = 0
        self._calls = 0

    def _check(
        self, list_entries: Callable[[], Sequence[Entry]], spread: Callable[[int], None]
    ) -> bool:
        """Count a step and, when it is due, compare; True when ``spread(source)`` mended replicas.

        ``spread`` raises on every rank where it cannot make them equal.
        """
        self._calls += 1
        if self._calls % self.every or world.current().size == 1:
            return False

        def entries() -> list[Entry]:
            return without(list_entries(), self.ignore)

        difference = replicas.compare(entries)
        if difference is None:
            return False
        if self.on_divergence == "raise":
            raise replicas.mismatch(difference)
        if verbs.rank() == 0:
            logger.warning(
                "step %d: %s; every rank is given the state of rank %d",
                self._calls,
                difference.text,
                difference.source,
            )
        spread(difference.source)
        replicas.check(entries)
        self.repairs += 1
        return True
