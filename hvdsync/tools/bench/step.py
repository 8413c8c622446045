"""One training step of hvdsync beside those of others: settings in, a report out.

All are timed in turns in one launch, beside the step of one process that talks to nobody.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hvdsync.comm import verbs
from hvdsync.tools.bench import environment
from hvdsync.tools.bench.contenders import COMMUNICATION, COMPUTE, HVDSYNC, Contender
from hvdsync.tools.bench.models import MODELS
from hvdsync.tools.bench.ratios import Ratio, paired
from hvdsync.tools.bench.report import Chart, Report, Table
from hvdsync.tools.bench.turns import take_turns

_LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Settings:
    """What is measured; see ``python -m hvdsync bench step --help``."""

    framework: str = "torch"
    models: Sequence[str] = tuple(MODELS)
    rounds: int = 20
    seconds: float = 0.15


@dataclass(frozen=True)
class Measured:
    """One model: seconds of a step by contender and round; traffic of one step of a rank."""

    model: str
    seconds: Mapping[str, list[float]]
    traffic: Mapping[str, tuple[float, float]]

    def ratio(self, name: str, to: str) -> Ratio:
        """Time of ``name`` over time of ``to``."""
        return paired(self.seconds[name], self.seconds[to])

    @property
    def noise(self) -> float:
        """Half the distance of the quartiles of the step that talks to nobody, in its median."""
        times = sorted(self.seconds[COMPUTE])
        return (times[3 * len(times) // 4] - times[len(times) // 4]) / 2 / median(times)


def measure(settings: Settings) -> Report:
    """Time all contenders on the ranks that were started; collective."""
    module = importlib.import_module(f"hvdsync.tools.bench.step_{settings.framework}")
    module.start()
    ranks = verbs.size()
    measured = []
    for model in settings.models:
        with module.contenders(model, _LEARNING_RATE) as contenders:
            measured.append(_measure(model, contenders, settings))
    report = make_report(settings, measured, ranks)
    module.stop()
    return report


def _measure(model: str, contenders: Mapping[str, Contender], settings: Settings) -> Measured:
    steps = {name: contender.step for name, contender in contenders.items()}
    seconds = take_turns(steps, rounds=settings.rounds, seconds=settings.seconds, first=COMPUTE)
    return Measured(
        model, seconds, {n: c.of_one_step() for n, c in contenders.items() if c.traffic}
    )


def make_report(settings: Settings, measured: Sequence[Measured], ranks: int) -> Report:
    """The report of what was measured."""
    about = [
        f"One training step, {settings.framework}, {ranks} worker(s), synthetic batches of each "
        f"worker's own; SGD with momentum. Medians of {settings.rounds} rounds in which all took "
        "turns; a ratio is that of times in the same round, with the interval in which its median "
        "lies with 95 % confidence. Where that is wider than a quarter of it, it is called noise."
    ]
    tables = [_times(measured), _ratios(measured)]
    if all(HVDSYNC in one.traffic for one in measured) and ranks > 1:
        tables.append(_traffic(measured, ranks))
    names = [one.model for one in measured]
    others = [name for name in measured[0].seconds if name not in (HVDSYNC, COMMUNICATION)]
    chart = Chart(
        "Time over that of hvdsync: above 1, hvdsync is faster",
        "bars",
        names,
        {name: [_told(one.ratio(name, _rival(name))) for one in measured] for name in others},
        marked=1.0,
    )
    numbers = {
        "settings": {**vars(settings), "models": list(settings.models)},
        "ranks": ranks,
        "seconds of a step": {one.model: dict(one.seconds) for one in measured},
        "time over hvdsync's": {
            one.model: {name: one.ratio(name, _rival(name)).as_dict() for name in others}
            for one in measured
        },
        "bytes and collectives of a step": {one.model: dict(one.traffic) for one in measured},
    }
    described = environment.describe(framework=settings.framework)
    return Report("step", about, described, tables, [chart], numbers)


def _rival(name: str) -> str:
    """That one of hvdsync with which ``name`` is compared: it does the same otherwise."""
    _, comma, where = name.partition(", in ")
    return HVDSYNC + comma + where


def _told(ratio: Ratio) -> float | None:
    return ratio.median if ratio.is_meaningful else None


def _times(measured: Sequence[Measured]) -> Table:
    names = [name for name in measured[0].seconds if name != COMMUNICATION]
    rows = [
        [
            one.model,
            *(f"{1000 * median(one.seconds[name]):.2f}" for name in names),
            f"{one.noise:.0%}",
        ]
        for one in measured
    ]
    note = "Noise: half the distance of the quartiles of the step that computes only."
    return Table("Milliseconds of a step", ["model", *names, "noise"], rows, [note])


def _ratios(measured: Sequence[Measured]) -> Table:
    names = [n for n in measured[0].seconds if n != COMMUNICATION and _rival(n) != n]
    rows = [
        [one.model, *(str(one.ratio(name, _rival(name))) for name in names)] for one in measured
    ]
    return Table("Time over that of hvdsync (above 1: hvdsync is faster)", ["model", *names], rows)


def _traffic(measured: Sequence[Measured], ranks: int) -> Table:
    columns = ["model", "MB a step", "collectives", "ms alone", "GB/s (bus)", "hidden"]
    rows = []
    for one in measured:
        sent, collectives = one.traffic[HVDSYNC]
        alone = median(one.seconds[COMMUNICATION])
        # By the definition of nccl-tests: what a ring has each rank pass on.
        bus = 2 * (ranks - 1) / ranks * sent / alone
        added = median(one.seconds[HVDSYNC]) - median(one.seconds[COMPUTE])
        hidden = min(max(1 - added / alone, 0.0), 1.0)
        row = [one.model, f"{sent / 1e6:.2f}", f"{collectives:.0f}", f"{1000 * alone:.2f}"]
        rows.append([*row, f"{bus / 1e9:.2f}", f"{hidden:.0%}"])
    notes = [
        "Alone: reduced with no backward pass beside it. Bus bandwidth as nccl-tests define it. "
        "Hidden: the share of that time by which a step is not longer than one that only computes."
    ]
    return Table("What hvdsync puts on the wire", columns, rows, notes)
