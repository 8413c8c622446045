"""Options that the front doors share: a user's arguments go in, checked ones or an error come out.

Horovod's wrappers of gradients take the same ones in every framework; so does ``distribute``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from hvdsync.sync.compression import describe


def check_gradient_options(
    *,
    averages: bool,
    predivide: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    passes: int = 1,
) -> int | Sequence[Sequence[Any]] | None:
    """``groups``, with Horovod's older ``num_groups`` taken into account.

    ``averages`` says whether the reduction is an average. Called by the function that the user
    calls. Raises ``ValueError`` for options out of range or that do not go together.
    """
    if predivide != 1.0 and not averages:
        raise ValueError(
            f"gradient_predivide_factor is {predivide}; it splits an average, so it needs "
            "op=Average"
        )
    if num_groups:
        warnings.warn("num_groups is now called groups", DeprecationWarning, stacklevel=3)
        groups = num_groups if groups is None else groups
    if isinstance(groups, int) and groups < 1:
        raise ValueError(
            f"groups is {groups}; expected a positive integer, or lists of what travels together"
        )
    if passes < 1:
        raise ValueError(f"backward_passes_per_step is {passes}; expected 1 or more")
    return groups


def option_facts(optimizer: Any, **options: Any) -> dict[str, Any]:
    """What ranks must have in common of an optimizer and its options, by name.

    For :func:`hvdsync.comm.comparison.require_equal`: lists count by their length, and objects
    that say nothing of themselves by their class.
    """
    facts: dict[str, Any] = {"class": type(optimizer).__name__}
    for name, value in options.items():
        if value is None or isinstance(value, bool | int | float | str):
            facts[name] = value
        elif isinstance(value, Sequence):
            facts[name] = f"{len(value)} of them"
        else:
            facts[name] = describe(value)
    return facts


def check_engine(engine: str, update: Any, *, offered: Sequence[str] = ("horovod",)) -> None:
    """Raise ``ValueError`` for what a front door's ``distribute`` does not offer."""
    if engine not in offered:
        listed = " or ".join(map(repr, offered))
        reason = "; DistributedDataParallel is PyTorch's own" if engine == "ddp" else ""
        raise ValueError(f"distribute: engine is {engine!r}; expected {listed}{reason}")
    if update is not None:
        raise ValueError(f"distribute: update is {update!r}; expected None (synchronous)")
