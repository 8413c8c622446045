"""Times of two things measured in turns in; their ratio out, with how far it can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

# Wider than this, relative to the median, an interval leaves open what is faster by how much.
WIDEST = 0.25
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios and the interval in which it lies with 95 % confidence.

    The interval is that of order statistics (of the binomial distribution), which asks nothing of
    how times are distributed; of fewer than six pairs it is the whole range.
    """

    median: float
    low: float
    high: float
    pairs: int

    @property
    def is_meaningful(self) -> bool:
        """Whether the interval is narrow enough for the ratio to be told; one pair has none."""
        return self.pairs > 1 and (self.high - self.low) / self.median <= WIDEST

    def __str__(self) -> str:
        if not self.is_meaningful:
            return f"noise ({self.low:.2f}-{self.high:.2f})"
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"

    def as_dict(self) -> dict[str, object]:
        """For JSON; without a median where noise hides it."""
        told = self.median if self.is_meaningful else None
        return {"median": told, "low": self.low, "high": self.high, "pairs": self.pairs}


def paired(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The ratio of what was measured in the same rounds."""
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    low, high = _interval(len(ratios))
    return Ratio(median(ratios), ratios[low], ratios[high], len(ratios))


def _interval(count: int) -> tuple[int, int]:
    """Positions, among ``count`` sorted values, that enclose the median of what they came from."""
    outside, position = 0.0, 0
    while position < count // 2:
        outside += 2 * math.comb(count, position) / 2**count
        if outside > 1 - _CONFIDENCE:
            break
        position += 1
    lowest = max(position - 1, 0)
    return lowest, count - 1 - lowest
