"""What ``bench link`` kept in; predictions beside what was measured out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from hvdsync.errors import HvdsyncError
from hvdsync.tools.bench import rates
from hvdsync.tools.bench.link import COMPUTE_ONLY, OnLink
from hvdsync.tools.bench.models import MODELS
from hvdsync.tools.bench.ratios import Ratio, paired
from hvdsync.tools.bench.report import Table
from hvdsync.tools.plan.network import Network
from hvdsync.tools.plan.payload import Bucket
from hvdsync.tools.plan.predict import CHOICES, Choice, Machine, predict

#: Beyond this a prediction is called out.
ALLOWED = 0.15
#: Those of ``bench link``, which share this machine.
WORKERS = 2


@dataclass(frozen=True)
class Kept:
    """One file of ``bench link``: the model, and what was measured on each link."""

    model: str
    links: Sequence[OnLink]

    @classmethod
    def read(cls, path: Path) -> Kept:
        """From ``link.json``. Raises :class:`HvdsyncError` where it is no such file."""
        try:
            content = json.loads(path.read_text())
            links = [OnLink(**link) for link in content["links"]]
            model = content["settings"]["model"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HvdsyncError(
                f"plan: {path} is not what `python -m hvdsync bench link --out` keeps in link.json "
                f"({type(error).__name__}: {error})"
            ) from error
        if model not in MODELS or not links:
            raise HvdsyncError(
                f"plan: {path} is of model {model!r} and {len(links)} link(s); expected one of "
                f"{', '.join(MODELS)} and a link or more"
            )
        return cls(model, links)

    def covers(self, model: str, rate: float | None, workers: int) -> bool:
        """Whether a prediction lies within what was measured: model, workers, and rates between."""
        if model != self.model or workers > WORKERS:
            return False
        measured = [link.rate for link in self.links]
        shaped = [one for one in measured if one is not None]
        if rate is None:
            return None in measured
        return bool(shaped) and min(shaped) <= rate <= max(shaped)

    def calibrated(self, network: Network) -> Network:
        """With Horovod's own time for a call, and what was measured within a host."""
        closest = max(self.links, key=lambda link: link.rate or 0.0)
        tuned = network.after_empty(closest.call_seconds, closest.latency_seconds)
        for link in self.links:
            if link.rate is None:
                tuned = _of_one_host(tuned, link)
        return tuned


def _of_one_host(network: Network, link: OnLink) -> Network:
    return replace(network, local_carried=link.carried, meeting_seconds=link.meeting_seconds)


@dataclass(frozen=True)
class Compared:
    """A row of ``bench link``, its median and interval, and its prediction, in seconds."""

    choice: Choice
    interval: Ratio
    predicted: float

    @property
    def measured(self) -> float:
        """The median."""
        return self.interval.median

    @property
    def deviation(self) -> float:
        """Of the prediction, relative to what was measured."""
        return self.predicted / self.measured - 1

    @property
    def verdict(self) -> str:
        """Empty where the prediction holds."""
        said = [] if abs(self.deviation) <= ALLOWED else [f"beyond {ALLOWED:.0%}"]
        return ", ".join(said if self.interval.is_meaningful else [*said, "noise"])


def compare(
    link: OnLink, machine: Machine, buckets: Sequence[Bucket], network: Network
) -> list[Compared]:
    """Each row that there is a model of.

    The compute time is the link's own, and what this machine's compressions cost is scaled to how
    busy it was then.
    """
    times = link.seconds_per_step
    then = machine.slower(median(times[COMPUTE_ONLY]) / machine.compute)
    # Ranks took their turns together then, so that what they computed alone was crowded, too.
    then = replace(then, cores=max(then.cores, WORKERS))
    own = replace(network, carried=link.carried, workers_per_host=1)
    if link.rate is None:
        own = _of_one_host(replace(own, carried=None), link)
    own = own.after_empty(link.call_seconds, link.latency_seconds)
    return [
        Compared(
            choice,
            paired(times[choice.name], [1.0] * len(times[choice.name])),
            predict(choice, then, buckets, own, WORKERS).seconds,
        )
        for choice in CHOICES
        if choice.name in times
    ]


def table(link: OnLink, rows: Sequence[Compared]) -> Table:
    """Measured, predicted, deviation; with how many hold."""
    cells = [
        (
            row.choice.name,
            f"{1000 * row.measured:.1f} ({1000 * row.interval.low:.1f}-"
            f"{1000 * row.interval.high:.1f})",
            f"{1000 * row.predicted:.1f}",
            f"{row.deviation:+.0%}",
            row.verdict,
        )
        for row in rows
    ]
    held = sum(abs(row.deviation) <= ALLOWED for row in rows)
    note = (
        f"{held} of {len(rows)} are within {ALLOWED:.0%}. Where it says noise, what was measured "
        "is too uncertain to agree or to disagree with."
    )
    columns = ("", "measured, ms", "predicted", "deviation", "")
    title = f"Checked: 2 workers, {rates.name(link.rate)}"
    return Table(title, columns, cells, [note])


def numbers(rows: Mapping[str, Sequence[Compared]]) -> dict[str, Any]:
    """For JSON, by link and row."""
    return {
        link: {
            row.choice.name: {
                "measured": row.measured,
                "predicted": row.predicted,
                "deviation": row.deviation,
                "low": row.interval.low,
                "high": row.interval.high,
            }
            for row in of_link
        }
        for link, of_link in rows.items()
    }
