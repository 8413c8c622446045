"""Update rules and compressions over slow links: settings in, times of steps and ratios out.

Two hosts are made for it (:mod:`hvdsync.tools.hosts`), and ``horovodrun`` starts a rank on each.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from hvdsync.errors import HvdsyncError
from hvdsync.tools.bench import environment, launched, rates
from hvdsync.tools.bench.models import MODELS
from hvdsync.tools.bench.ratios import Ratio, paired
from hvdsync.tools.bench.report import Chart, Report, Table
from hvdsync.tools.hosts import two_hosts

COMPUTE_ONLY = "compute only"
SYNCHRONOUS = "synchronous"
# Ethernet, IP and TCP take 5 % of a link; a burst that is too long, or a second process on the
# processor, shows as more and less than what was asked for.
_LEAST_CARRIED, _MOST_CARRIED = 0.7, 1.02
_SECONDS = 3600


@dataclass(frozen=True)
class Settings:
    """What is measured; see ``python -m hvdsync bench link --help``.

    ``links`` are bits per second, None for the loopback of one host.
    """

    links: tuple[float | None, ...] = (1e8, 1e9, None)
    compressions: tuple[str, ...] = (
        *("fp16", "bf16", "powersgd:1", "powersgd:4", "topk:0.01", "onebit"),
    )
    periods: tuple[int, ...] = (4, 16)
    model: str = "mlp"
    rounds: int = 16

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Settings:
        """The settings that ``asdict`` and JSON made lists of."""
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in fields.items()
        }
        return cls(**values)


@dataclass(frozen=True)
class OnLink:
    """What was measured on one link.

    ``carried`` is what a bare all-reduce sent from each rank, in bits per second;
    ``latency_seconds`` is an empty one after a step's computing, when one rank waits for the other,
    and ``call_seconds`` another right behind it. ``meeting_seconds`` is after a step's computing,
    too, as synchronous training without compression has it: ranks of one host meet in memory.
    ``seconds_per_step`` has one entry a round, those of the slowest rank; ``sent_bytes_per_step``
    are what each rank sends, headers and acknowledgements included.
    """

    rate: float | None
    carried: float
    latency_seconds: float
    call_seconds: float
    meeting_seconds: float
    parameters: int
    seconds_per_step: dict[str, list[float]]
    sent_bytes_per_step: dict[str, float]

    def over(self, base: str) -> dict[str, Ratio]:
        """Time of each over that of ``base``, in the same rounds."""
        times = self.seconds_per_step
        return {name: paired(taken, times[base]) for name, taken in times.items()}

    def table(self) -> Table:
        """One row for each that was compared."""
        to_compute, to_synchronous = self.over(COMPUTE_ONLY), self.over(SYNCHRONOUS)
        rows = [
            (
                name,
                f"{1000 * median(times):.1f}",
                f"{self.sent_bytes_per_step[name] / 1e6:.2f}",
                str(to_compute[name]),
                "" if name == COMPUTE_ONLY else str(to_synchronous[name]),
            )
            for name, times in self.seconds_per_step.items()
        ]
        columns = ("", "ms", "sent, MB", "x compute only", "x synchronous")
        said = (
            f"A bare all-reduce sends {self.carried / 1e6:,.0f} Mbit/s from each rank, an empty "
            f"one after a step's computing takes {1000 * self.latency_seconds:.2g} ms, and "
            f"{1000 * self.call_seconds:.2g} ms right behind another."
        )
        return Table(f"Training step, {rates.name(self.rate)}", columns, rows, [said])


@dataclass(frozen=True)
class Measured:
    """All links, in the order of the settings."""

    settings: Settings
    links: list[OnLink]

    def report(self) -> Report:
        """Step times and their ratios to compute only, the losing cases among them."""
        first = self.links[0]
        about = (
            "2 ranks, one each on two hosts with a cable between them (loopback: both on one), "
            f"started by horovodrun over Gloo; PyTorch, model {self.settings.model} of "
            f"{first.parameters:,} parameters ({4 * first.parameters / 2**20:.1f} MiB of "
            f"gradients), batches of {MODELS[self.settings.model].batch_size}.",
            f"Medians of {self.settings.rounds} round(s) in which all took turns, with intervals "
            "of 95 %. What is above 1 in the last column loses to synchronous training without "
            "compression.",
        )
        names = list(first.seconds_per_step)
        chart = Chart(
            "Time of a step over that of compute only",
            "rows",
            names,
            {
                rates.name(link.rate): [
                    ratio.median if ratio.is_meaningful else None
                    for ratio in link.over(COMPUTE_ONLY).values()
                ]
                for link in self.links
            },
            x_scale="log",
            marked=1.0,
        )
        return Report(
            "link",
            about,
            environment.describe(ranks=2),
            [link.table() for link in self.links],
            [chart],
            {"settings": asdict(self.settings), "links": [asdict(link) for link in self.links]},
        )


def is_as_asked(rate: float | None, carried: float) -> bool:
    """Whether a link carries about what it should, both in bits per second."""
    return rate is None or _LEAST_CARRIED <= carried / rate <= _MOST_CARRIED


def measure(settings: Settings) -> Measured:
    """Run everything on each link, one after the other.

    Raises :class:`HvdsyncError` where hosts cannot be made, when a run fails, and when a link does
    not carry what it should.
    """
    with tempfile.TemporaryDirectory(prefix="hvdsync-link-") as folder:
        links = [
            _on_link(settings, rate, Path(folder, str(i))) for i, rate in enumerate(settings.links)
        ]
    return Measured(settings, links)


def _on_link(settings: Settings, rate: float | None, folder: Path) -> OnLink:
    with two_hosts(folder, megabits=None if rate is None else rate / 1e6) as (first, second):
        places = f"{first.name}:1,{second.name}:1" if rate is not None else "localhost:2"
        # Interfaces are named: to look for one takes Horovod seconds.
        interface = first.interface if rate is not None else "lo"
        command = [
            *("horovodrun", "--gloo", "-np", "2", "-H", places, "--network-interface", interface),
            *("python", "-m", "hvdsync.tools.bench.link_rank"),
            *(json.dumps(asdict(settings)), json.dumps(rate), "measured.json"),
        ]
        what = f"bench link: the run over {rates.name(rate)}"
        launched.finish(first.command(command), what, _SECONDS)
        measured = OnLink(**json.loads((first.disk / "measured.json").read_text()))
    if not is_as_asked(rate, measured.carried):
        raise HvdsyncError(
            f"bench link: a link of {rates.name(rate)} carried {measured.carried / 1e6:,.0f} "
            "Mbit/s in a bare all-reduce, so that what was measured on it means nothing; is the "
            "machine busy with something else?"
        )
    return measured
