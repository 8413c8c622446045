"""A verdict that is asked for at every step and seldom has to travel: a wish in, one answer out."""

from __future__ import annotations

import time

import numpy as np

from hvdsync.comm import world

# How long a wish may go unnoticed while steps are shorter than that.
_SECONDS = 0.25
_MOST_STEPS = 1000


class RecurringVerdict:
    """Makes the wish of one rank the verdict of all, after the same step.

    ``every`` is the number of steps from one exchange between ranks to the next. None exchanges
    about four times a second, and at each step where steps take longer than that; the ranks agree
    on it. On the wire: one all-reduce of 16 bytes for each exchange, under ``name``.
    """

    def __init__(self, name: str, every: int | None = None) -> None:
        self._name = name
        self._every = every
        self._steps = 0
        self._until = 1
        self._last_exchange = time.monotonic()

    def ask(self, wish: bool) -> bool:
        """Whether any rank wishes; every rank asks equally often, once after each step.

        Between exchanges it is False: a wish is to be kept up until it has become the verdict.
        """
        comm = world.current()
        if comm.size == 1:
            return wish
        self._steps += 1
        if self._steps < self._until:
            return False
        now = time.monotonic()
        taken = now - self._last_exchange
        steps = self._every or round(_SECONDS * self._steps / max(taken, 1e-6))
        mine = np.array([wish, -min(max(steps, 1), _MOST_STEPS)], np.int64)
        # The slowest rank's interval, which is the shortest in steps.
        agreed = comm.allreduce(mine, "max", self._name)
        self._last_exchange, self._steps, self._until = now, 0, int(-agreed[1])
        return bool(agreed[0])
