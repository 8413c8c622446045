"""Steps that ranks take alone: a rule and a count of steps in, what is equal on all ranks now out.

Written once for all frameworks; how parameters meet comes in from below.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from hvdsync.comm import verbs, world
from hvdsync.errors import RankMismatch
from hvdsync.sync.update_rules import LocalRule


class LocalSteps(ABC):
    """Where one optimizer stands between the meetings of its rule.

    What is equal follows from ``rule``, ``steps`` and the last early meeting: all ranks know it
    alike, and nothing travels to tell.
    """

    def __init__(self, rule: LocalRule) -> None:
        self.rule = rule
        self._all_equal_after = 0

    @property
    @abstractmethod
    def steps(self) -> int:
        """Optimizer steps so far; the same on all ranks."""

    @property
    @abstractmethod
    def parts(self) -> int:
        """Into how many fragments the parameters are cut."""

    @abstractmethod
    def _meet(self, which: Sequence[int]) -> None:
        """Make these fragments equal on all ranks; collective."""

    @abstractmethod
    def _share_state(self) -> None:
        """Give all ranks the optimizer state of rank 0; collective."""

    @property
    def is_all_equal(self) -> bool:
        """Whether model and optimizer state are equal on all ranks now."""
        return (
            self.steps <= self.rule.warmup_steps
            or self._all_equal_after == self.steps
            or world.current().size == 1
        )

    def met(self) -> list[int]:
        """The fragments that are equal on all ranks now."""
        everything = self.is_all_equal
        return [i for i in range(self.parts) if everything or self.rule.is_due(self.steps, i)]

    @property
    def replicas_equal(self) -> bool:
        """Whether parameters are equal on all ranks now."""
        return self.is_all_equal or len(self.met()) == self.parts

    def synchronize_replicas(self) -> None:
        """Make all state equal on all ranks, by an early meeting where it is not; collective."""
        if self.is_all_equal:
            return
        met = self.met()
        self._meet([i for i in range(self.parts) if i not in met])
        self._share_state()
        self._all_equal_after = self.steps

    def _taken_up(self) -> None:
        """All ranks have been given the same state, and its number of steps."""
        self._all_equal_after = self.steps


def refuse_different_steps(steps: int) -> None:
    """Raise :class:`RankMismatch` on every rank unless all have taken as many steps.

    On the wire: one all-gather of 8 bytes a rank.
    """
    comm = world.current()
    require_equal_steps(comm.allgather(np.array([steps], np.int64), "hvdsync.local_steps").tolist())


def require_equal_steps(everyone: Sequence[int]) -> None:
    """Raise :class:`RankMismatch` unless all ranks, in their order, have taken as many steps."""
    if len(set(everyone)) == 1:
        return
    counts = ", ".join(f"rank {rank}: {count:,}" for rank, count in enumerate(everyone))
    raise RankMismatch(
        f"rank {verbs.rank()} of {verbs.size()}: ranks synchronise their replicas after different "
        f"numbers of optimizer steps ({counts}); expected the same on every rank. Take as many "
        "steps everywhere, as hvd.even_batches does. A GradScaler leaves out steps of one rank; "
        "bfloat16 needs none"
    )
