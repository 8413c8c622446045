"""Predictions for all links, workers and choices in; the report of ``plan`` out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from hvdsync.tools.bench import environment, rates
from hvdsync.tools.bench.report import Chart, Report, Table
from hvdsync.tools.plan import check
from hvdsync.tools.plan.network import Network
from hvdsync.tools.plan.payload import Bucket
from hvdsync.tools.plan.predict import (
    CHOICES,
    PLAIN,
    Choice,
    Machine,
    Prediction,
    best,
    break_even,
    predict,
)

_MARK = "*"
_MAKE_ONE = (
    "Nothing of this was compared with a measurement, so that all of it is extrapolated. As root, "
    "`python -m hvdsync bench link --link 100Mbit,1Gbit,loopback --out results` "
    "makes one between two hosts on this machine, and `--check results/link.json` compares."
)


@dataclass(frozen=True)
class Settings:
    """What is planned; see ``python -m hvdsync plan --help``. ``links`` are bits per second."""

    model: str = "mlp"
    workers: tuple[int, ...] = (2, 8, 64, 512)
    links: tuple[float | None, ...] = (1e9, 25e9)
    workers_per_host: int = 1
    over: str = "gloo"
    hop_seconds: float = 20e-6
    call_seconds: float = 1e-3
    local_carried: float = 5e9

    def network(self, rate: float | None) -> Network:
        """That of one of the links."""
        return Network.of_link(
            rate,
            hop_seconds=self.hop_seconds,
            call_seconds=self.call_seconds,
            local_carried=self.local_carried,
            workers_per_host=self.workers_per_host,
            is_mpi=self.over == "mpi",
        )


@dataclass(frozen=True)
class Plan:
    """All that is known; what it comes to is computed where it is shown.

    ``compared`` are the rows of ``kept`` by link.
    """

    settings: Settings
    machine: Machine
    buckets: Sequence[Bucket]
    kept: check.Kept | None = None
    compared: Mapping[str, Sequence[check.Compared]] = field(default_factory=dict)

    def network(self, rate: float | None) -> Network:
        """A link, with what was measured of Horovod if anything was."""
        network = self.settings.network(rate)
        return self.kept.calibrated(network) if self.kept else network

    def at(self, rate: float | None, workers: int) -> dict[Choice, Prediction]:
        """All choices on one link, in order."""
        network = self.network(rate)
        return {
            choice: predict(choice, self.machine, self.buckets, network, workers)
            for choice in CHOICES
        }

    def mark(self, rate: float | None, workers: int) -> str:
        """What stands behind a prediction that was extrapolated."""
        model = self.settings.model
        known = self.kept is not None and self.kept.covers(model, rate, workers)
        return "" if known or workers == 1 else _MARK

    def _cells(self) -> Iterator[tuple[float | None, int]]:
        for rate in self.settings.links:
            for workers in self.settings.workers:
                yield rate, workers

    def report(self) -> Report:
        """What is best comes first, then how it compares, what it rests on, and the check."""
        gradients = sum(part.size for bucket in self.buckets for part in bucket.parts)
        settings, on_host = self.settings, self.network(None)
        about = [
            f"{settings.model}: {gradients:,} parameters, {4 * gradients / 2**20:.1f} MiB of "
            f"gradients, {1000 * self.machine.compute:.2f} ms of computing in a step, each worker "
            "a batch of its own. Efficiency is that time over the time of the step.",
            f"Workers over {settings.over}, {settings.workers_per_host} on a host, with cores of "
            "their own (loopback: all share this machine's); a message between two takes "
            f"{1e6 * settings.hop_seconds:g} us, a collective besides "
            f"{1000 * on_host.call_seconds:.1f} ms; processes of one host send one another "
            f"{on_host.local_carried / 1e9:.2g} Gbit/s. {_MARK} marks what is extrapolated.",
        ]
        if self.kept is None:
            about.append(_MAKE_ONE)
        tables = [self._summary(), *map(self._choices, settings.links)]
        if any(map(self._is_apart, settings.workers)):
            tables.append(self._break_even())
        tables.append(self._all_reduces())
        if self.kept is not None:
            for link in self.kept.links:
                rows = self.compared[rates.name(link.rate)]
                tables.append(check.table(link, rows))
        return Report(
            "plan",
            about,
            environment.describe(model=settings.model),
            tables,
            [self._chart()],
            self._numbers(),
        )

    def _summary(self) -> Table:
        rows = []
        for rate, workers in self._cells():
            found = self.at(rate, workers)
            together = {choice: told for choice, told in found.items() if choice.period == 1}
            mark = self.mark(rate, workers)
            cells = [f"{rates.name(rate)}, {workers}{mark}", _cell(found[PLAIN])]
            for choices in (together, found):
                choice = best(choices)
                cells += [choice.name, _cell(found[choice])]
            rows.append(cells)
        note = (
            "The simplest of those within 3 % of the fastest. What is not plain synchronous trains "
            "differently: docs/compression.md and docs/update-rules.md say what that costs."
        )
        columns = ("link, workers", "synchronous", "best step together", "", "best of all", "")
        return Table("What to use: ms (efficiency)", columns, rows, [note])

    def _choices(self, rate: float | None) -> Table:
        workers = self.settings.workers
        found = [self.at(rate, count) for count in workers]
        rows = [[choice.name, *(_cell(one[choice]) for one in found)] for choice in CHOICES]
        columns = ["", *(f"{count}{self.mark(rate, count)}" for count in workers)]
        return Table(f"Step, {rates.name(rate)}, ms (efficiency), by workers", columns, rows)

    def break_even(self, choice: Choice, workers: int) -> float | None:
        """The rate below which a choice is faster than plain synchronous training."""
        network = self.network(self.settings.links[0])

        def seconds_at(rate: float) -> tuple[float, float]:
            of_rate = network.with_rate(rate)
            first, second = (
                predict(one, self.machine, self.buckets, of_rate, workers).seconds
                for one in (choice, PLAIN)
            )
            return first, second

        return break_even(seconds_at)

    def _break_even(self) -> Table:
        counts = [count for count in self.settings.workers if self._is_apart(count)]
        rows = [
            [choice.name, *(self._rate(choice, count) for count in counts)]
            for choice in CHOICES
            if choice != PLAIN
        ]
        columns = ["", *(str(count) for count in counts)]
        note = f"Faster than synchronous on links below this rate; {_MARK}: extrapolated."
        return Table("Breaks even at, by workers", columns, rows, [note])

    def _is_apart(self, workers: int) -> bool:
        return workers > self.settings.workers_per_host

    def _rate(self, choice: Choice, workers: int) -> str:
        rate = self.break_even(choice, workers)
        if rate is None:
            return f"never faster{_MARK}"
        if math.isinf(rate):
            return f"always faster{_MARK}"
        return rates.name(float(f"{rate:.2g}")) + self.mark(rate, workers)

    def _all_reduces(self) -> Table:
        nbytes = sum(bucket.nbytes for bucket in self.buckets)
        rows = []
        for rate, workers in self._cells():
            if workers == 1:
                continue
            network = self.network(rate)
            seconds = (
                network.ring(workers, nbytes),
                network.tree(workers, nbytes),
                network.by_hosts(workers, nbytes, self.machine.added),
                network.delay(workers),
            )
            name = f"{rates.name(rate)}, {workers}"
            rows.append([name, *(f"{1000 * value:.4g}" for value in seconds)])
        note = (
            "All gradients in one. Between hosts there is the ring over Gloo, the smaller of ring "
            "and tree over MPI; within one host, uncompressed, memory in common. Memory first and "
            "a ring of hosts then is what hvdsync does not do yet; it saves messages, not bytes."
        )
        columns = ("link, workers", "ring", "tree", "memory, then ring of hosts", "agreement first")
        return Table("One all-reduce, ms", columns, rows, [note])

    def _chart(self) -> Chart:
        series: dict[str, list[float | None]] = {}
        for rate in self.settings.links:
            found = [self.at(rate, count) for count in self.settings.workers]
            name = rates.name(rate)
            series[f"{name}, synchronous"] = [one[PLAIN].efficiency for one in found]
            series[f"{name}, best of all"] = [one[best(one)].efficiency for one in found]
        return Chart(
            "Efficiency",
            "lines",
            list(self.settings.workers),
            series,
            "workers",
            "time of computing / time of a step",
            x_scale="log",
            marked=1.0,
        )

    def _numbers(self) -> dict[str, object]:
        cells = [
            {
                "link": rates.name(rate),
                "workers": workers,
                "extrapolated": bool(self.mark(rate, workers)),
                "choices": {
                    choice.name: {**asdict(told), "efficiency": told.efficiency}
                    for choice, told in self.at(rate, workers).items()
                },
            }
            for rate, workers in self._cells()
        ]
        return {
            "settings": asdict(self.settings),
            "machine": asdict(self.machine),
            "predictions": cells,
            "checked": check.numbers(self.compared),
        }


def _cell(told: Prediction) -> str:
    milliseconds = 1000 * told.seconds
    number = f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
    return f"{number} ({told.efficiency:.0%})"


def make(
    settings: Settings,
    machine: Machine,
    shapes: Sequence[tuple[int, ...]],
    kept: check.Kept | None = None,
    kept_machine: Machine | None = None,
    kept_shapes: Sequence[tuple[int, ...]] = (),
) -> Plan:
    """A plan, and its check where ``kept`` is given; that may be of another model."""
    from hvdsync.tools.plan.payload import buckets_of

    compared = {}
    if kept is not None and kept_machine is not None:
        buckets = buckets_of(kept_shapes)
        for link in kept.links:
            network = settings.network(link.rate)
            compared[rates.name(link.rate)] = check.compare(link, kept_machine, buckets, network)
    return Plan(settings, machine, buckets_of(shapes), kept, compared)
