"""Update rules: when replicas agree, and the mathematics of how, for arrays of any framework.

Descriptions without state go in to ``update=``; what a rule remembers, each backend keeps.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Synchronous:
    """Gradients are averaged before each update: replicas are equal after every step."""


@dataclass(frozen=True)
class Asynchronous:
    """Each rank applies its updates to shared parameters and goes on without waiting.

    ``staleness`` bounds by how many steps a rank may be ahead of the slowest; None is no bound.
    Raises ``ValueError`` for a negative one.
    """

    staleness: int | None = None

    def __post_init__(self) -> None:
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(
                f"Asynchronous: staleness is {self.staleness}; expected None, or 0 or more steps"
            )


class LocalRule(ABC):
    """What :class:`LocalSGD` and :class:`DiLoCo` share: steps of each rank alone, then a meeting.

    ``period``: optimizer steps between two synchronisations of the same parameter.
    ``warmup_steps``: so many first steps are synchronous. ``fragments``: the parameters are cut
    into so many parts of about equal bytes, which are synchronised in turn, evenly spread over the
    period, so that what travels at one step is a part.
    """

    period: int
    warmup_steps: int
    fragments: int

    # Whether a second optimizer steps at the meetings, of which each parameter needs memory.
    has_outer_optimizer: ClassVar[bool] = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.period < 1:
            raise ValueError(f"{name}: period is {self.period}; expected 1 or more steps")
        if self.warmup_steps < 0:
            raise ValueError(f"{name}: warmup_steps is {self.warmup_steps}; expected 0 or more")
        if not 1 <= self.fragments <= self.period:
            raise ValueError(
                f"{name}: fragments is {self.fragments}; expected 1 up to the period, {self.period}"
                ": there is one step of it for each"
            )

    def is_due(self, step: Any, fragment: int) -> Any:
        """Whether a fragment is synchronised after the step of this number, from 1, past warm-up.

        ``step`` is a number or a tensor.
        """
        offset = fragment * self.period // self.fragments
        return (step - self.warmup_steps + offset) % self.period == 0


@dataclass(frozen=True)
class LocalSGD(LocalRule):
    """Each rank trains alone for ``period`` steps; then parameters are averaged over ranks.

    Arguments as in :class:`LocalRule`. Raises ``ValueError`` for values out of range. Stich, "Local
    SGD Converges Fast and Communicates Little", arXiv:1805.09767.
    """

    period: int
    warmup_steps: int = 0
    fragments: int = 1


@dataclass(frozen=True)
class DiLoCo(LocalRule):
    """Each rank trains alone for ``period`` steps; then an outer optimizer makes one step for all.

    Its gradient is the mean over ranks of how far each has come from the parameters that all had
    after the last meeting (the anchor); it is SGD with Nesterov momentum, of learning rate
    ``outer_lr`` (above 0) and momentum ``outer_momentum`` (from 0, below 1). With 1 and 0 it comes
    to :class:`LocalSGD`.

    Other arguments as in :class:`LocalRule`. Raises ``ValueError`` for values out of range.
    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
    arXiv:2311.08105; fragments in turn are those of "Streaming DiLoCo", arXiv:2501.18512.
    """

    period: int
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    warmup_steps: int = 0
    fragments: int = 1

    has_outer_optimizer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.outer_lr > 0:
            raise ValueError(f"DiLoCo: outer_lr is {self.outer_lr}; expected a number above 0")
        if not 0 <= self.outer_momentum < 1:
            raise ValueError(
                f"DiLoCo: outer_momentum is {self.outer_momentum}; expected 0 or more, and below 1"
            )

    def outer_step(self, anchor: Any, momentum: Any, gradient: Any) -> tuple[Any, Any]:
        """The next anchor and momentum; ``gradient`` is the mean of ``anchor - parameter``.

        Arrays or tensors of one shape. As PyTorch's ``SGD(nesterov=True)``, whose momentum is 0 at
        first.
        """
        momentum = self.outer_momentum * momentum + gradient
        step = gradient + self.outer_momentum * momentum
        return anchor - self.outer_lr * step, momentum


def cut(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Positions of ``sizes``, in order, in at most ``parts`` runs of about equal sums.

    None of the runs is empty; where there are fewer sizes than parts, there are fewer runs.
    """
    parts = min(parts, len(sizes))
    runs: list[list[int]] = []
    total, before = max(sum(sizes), 1), 0
    for i, size in enumerate(sizes):
        # A new run where the next share of the total begins, and where each size left needs one.
        begins = (before + size / 2) * parts >= total * len(runs)
        needed = len(sizes) - i == parts - len(runs)
        if not runs or (len(runs) < parts and (begins or needed)):
            runs.append([])
        runs[-1].append(i)
        before += size
    return runs
