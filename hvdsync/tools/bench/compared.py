"""Things that were timed in the same rounds, one of them the measure of the others: a table out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hvdsync.tools.bench.ratios import Ratio, paired
from hvdsync.tools.bench.report import Chart, Table


@dataclass(frozen=True)
class Compared:
    """Seconds by name and round; ``base`` names the one that all are compared with."""

    seconds: Mapping[str, Sequence[float]]
    base: str

    def ratio(self, name: str) -> Ratio:
        """Time of ``name`` over that of the base, in the same rounds."""
        return paired(self.seconds[name], self.seconds[self.base])

    def table(self, title: str, *, per: float = 1.0) -> Table:
        """Medians in milliseconds of the ``per``-th part, and ratios to the base."""
        rows = []
        for name, times in self.seconds.items():
            told = "1" if name == self.base else str(self.ratio(name))
            rows.append((name, f"{1000 * median(times) / per:.3g}", told))
        return Table(title, ("", "ms", f"time over {self.base}"), rows)

    def chart(self, title: str) -> Chart:
        """A bar for each ratio that can be told."""
        ratios = [self.ratio(name) for name in self.seconds]
        told = [ratio.median if ratio.is_meaningful else None for ratio in ratios]
        return Chart(title, "bars", list(self.seconds), {f"over {self.base}": told}, marked=1.0)

    def numbers(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "base": self.base,
            "seconds": {name: list(times) for name, times in self.seconds.items()},
            "ratios": {name: self.ratio(name).as_dict() for name in self.seconds},
        }
