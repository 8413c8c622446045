"""Times over numbers of ranks in; how they grow out: the simplest law that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

#: Simplest first: a law must fit clearly better than those before it.
LAWS: dict[str, Callable[[float], float]] = {
    "constant": lambda ranks: 0.0,
    "logarithmic": lambda ranks: math.log2(ranks),
    "linear": lambda ranks: ranks,
    "quadratic": lambda ranks: ranks**2,
}
_CLEARLY = 0.7


@dataclass(frozen=True)
class Growth:
    """``base + slope * law(ranks)`` seconds; ``error`` is the root mean square, relative."""

    law: str
    base: float
    slope: float
    error: float

    def at(self, ranks: float) -> float:
        """Seconds at another number of ranks."""
        return self.base + self.slope * LAWS[self.law](ranks)

    def __str__(self) -> str:
        return f"{self.law} (+/- {self.error:.0%})"


def fit(ranks: Sequence[int], seconds: Sequence[float]) -> Growth:
    """The simplest law whose relative error is not clearly above that of a steeper one."""
    fits = [_fit(law, ranks, seconds) for law in LAWS]
    chosen = fits[0]
    for steeper in fits[1:]:
        if steeper.error < _CLEARLY * chosen.error and steeper.slope > 0:
            chosen = steeper
    return chosen


def _fit(law: str, ranks: Sequence[int], seconds: Sequence[float]) -> Growth:
    values = np.array([LAWS[law](one) for one in ranks])
    times = np.asarray(seconds, float)
    # Errors are relative: the small times of few ranks count as much as the large ones of many.
    columns = np.stack([1 / times, values / times], axis=1)
    if law == "constant":
        columns = columns[:, :1]
    found, *_ = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)
    base, slope = float(found[0]), float(found[1]) if len(found) > 1 else 0.0
    if base < 0:
        # Nothing takes less than no time: through the origin instead.
        slope, base = float(columns[:, 1] @ np.ones(len(times)) / (columns[:, 1] ** 2).sum()), 0.0
    error = float(np.sqrt(np.mean(((base + slope * values) / times - 1) ** 2)))
    return Growth(law, base, slope, error)
