"""Steps of each rank upon parameters that all share: a rule in, what to do before and after a step.

Written once for all frameworks; how values come out of parameters and into them is handed in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from hvdsync.guard.watch import watch
from hvdsync.sync.asynchronous import SharedParameters
from hvdsync.sync.update_rules import Asynchronous

Arrays: TypeAlias = list[np.ndarray]
# Gives parameters what a function makes of their values, if the condition is true. What comes of
# the function is written to again: a framework that keeps arrays must be given copies.
HandOver: TypeAlias = Callable[
    [Sequence[Any], Callable[[Arrays], Arrays], Callable[[], bool] | None], None
]


class SharedSteps(ABC):
    """What :class:`Asynchronous` adds to one optimizer: its parameters are shared from its first
    step on, and changed by what each rank's steps change in them.

    ``parameters`` gives the current ones, alike on all ranks.
    """

    def __init__(
        self, rule: Asynchronous, hand_over: HandOver, parameters: Callable[[], Sequence[Any]]
    ) -> None:
        self.rule = rule
        self.shared: SharedParameters | None = None
        self.replicas_equal = True
        self._hand_over = hand_over
        self._parameters = parameters
        self._shared_ones: Sequence[Any] = ()
        self._is_outdated = False

    @abstractmethod
    def _meet(self) -> None:
        """Make equal on all ranks what is not shared; collective."""

    @property
    def waited_seconds(self) -> float:
        """Seconds that exchanges of parameters took so far."""
        return 0.0 if self.shared is None else self.shared.waited_seconds

    def before_step(self) -> None:
        """To be called before each step: shares what is not shared yet; collective then."""
        parameters = self._parameters()
        if self.shared is not None and len(self._shared_ones) != len(parameters):
            # Some were added, on all ranks: what the others have come to is kept.
            self.synchronize_replicas()
            self.shared.close()
            self.shared = None
        self._shared_ones = parameters
        self._hand_over(parameters, self._begin, self._is_to_begin)

    def after_step(self) -> None:
        """To be called after each step: what it changed goes out, and what all changed comes in."""
        self._hand_over(self._shared_ones, self._exchange, None)

    def _is_to_begin(self) -> bool:
        return self.shared is None or self._is_outdated

    def _begin(self, arrays: Arrays) -> Arrays:
        if self.shared is None:
            # Halves are shared in single precision: what others add is not rounded away.
            wide = [a if a.dtype == np.float64 else a.astype(np.float32) for a in arrays]
            self.shared = SharedParameters(
                wide, staleness=self.rule.staleness, wait_limit=watch.wait_limit()
            )
        else:
            self._put(arrays)
            self.shared.reset()
        self._is_outdated = False
        return self._values_like(arrays)

    def _exchange(self, arrays: Arrays) -> Arrays:
        assert self.shared is not None
        self._put(arrays)
        self.shared.exchange()
        self.replicas_equal = False
        return self._values_like(arrays)

    def _put(self, arrays: Arrays) -> None:
        assert self.shared is not None
        for values, array in zip(self.shared.values, arrays, strict=True):
            values[...] = array

    def _values_like(self, arrays: Arrays) -> Arrays:
        assert self.shared is not None
        pairs = zip(self.shared.values, arrays, strict=True)
        return [values.astype(array.dtype, copy=False) for values, array in pairs]

    def synchronize_replicas(self) -> None:
        """Make all state equal on all ranks; collective, whatever steps each has made."""
        if self._is_to_begin():
            return  # all have what they were given, and no step has been made from there
        moved = False

        def agree(arrays: Arrays) -> Arrays:
            nonlocal moved
            assert self.shared is not None
            self._put(arrays)
            moved = self.shared.agree()
            return self._values_like(arrays)

        self._hand_over(self._shared_ones, agree, None)
        if moved:
            self._meet()
        self.replicas_equal = True

    def take_up(self) -> None:
        """Share, from the next step on, the values that rank 0 has then."""
        self._is_outdated = self.shared is not None
        self.replicas_equal = True
