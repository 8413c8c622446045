"""Steps at growing numbers of ranks: each has its batch (weak), or its part of one (strong).

Each number of ranks is a launch of its own, and they take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from hvdsync.tools.bench import environment
from hvdsync.tools.bench.ratios import paired
from hvdsync.tools.bench.report import Chart, Report, Table

WEAK, STRONG = "weak", "strong"


@dataclass(frozen=True)
class Settings:
    """What is measured; see ``python -m hvdsync bench scaling --help``."""

    model: str = "mlp"
    sizes: Sequence[int] = (1, 2, 4)
    rounds: int = 6
    seconds: float = 0.3


def measure(settings: Settings) -> Report:
    """Launch and time; raises :class:`RunFailed` when a rank fails."""
    import hvdsync

    taken: dict[int, dict[str, list[float]]] = {n: {WEAK: [], STRONG: []} for n in settings.sizes}
    for _ in range(settings.rounds):
        for size in settings.sizes:
            first, *_ = hvdsync.run(
                step_seconds,
                (settings.model, settings.seconds),
                np=size,
                env={"OMP_NUM_THREADS": "1"},
            )
            for kind, seconds in first.items():
                taken[size][kind].append(seconds)
    return make_report(settings, taken)


def step_seconds(model: str, seconds: float) -> dict[str, float]:
    """On one rank of a launch: the time of a step of each kind, the median of some turns."""
    import torch

    import hvdsync.torch as hvd
    from hvdsync.tools.bench import torch_models
    from hvdsync.tools.bench.turns import take_turns

    hvd.init()
    torch.set_num_threads(1)
    whole = torch_models.batch_for(model, seed=hvd.rank())
    count = max(len(whole[1]) // hvd.size(), 1)
    steps = {
        WEAK: _stepper(model, whole),
        STRONG: _stepper(model, (whole[0][:count], whole[1][:count])),
    }
    taken = take_turns(steps, rounds=5, seconds=seconds / 5, first=WEAK)
    hvd.shutdown()
    return {kind: median(times) for kind, times in taken.items()}


def _stepper(name: str, batch: tuple) -> Callable[[], None]:  # type: ignore[type-arg]
    import torch

    import hvdsync.torch as hvd
    from hvdsync.tools.bench import torch_models

    model = torch_models.make(name)
    model, optimizer = hvd.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
    return torch_models.training_step(model, optimizer, batch)


def make_report(settings: Settings, taken: Mapping[int, Mapping[str, Sequence[float]]]) -> Report:
    """The report of step times by number of ranks, kind and round."""
    base = settings.sizes[0]
    rows = []
    efficiencies: dict[str, list[float | None]] = {WEAK: [], STRONG: []}
    numbers = {}
    for size, kinds in taken.items():
        row = [str(size)]
        for kind, times in kinds.items():
            ideal = 1.0 if kind == WEAK else base / size
            efficiency = paired([ideal * t for t in taken[base][kind]], times)
            told = efficiency.median if efficiency.is_meaningful else None
            efficiencies[kind].append(told)
            row += [f"{1000 * median(times):.3g}", "1" if size == base else str(efficiency)]
            numbers[f"{kind}, {size} ranks"] = efficiency.as_dict()
        rows.append(row)
    about = (
        f"A step of {settings.model} in PyTorch, one thread each. Weak: every worker has a whole "
        f"batch; strong: one batch is shared. Medians of {settings.rounds} round(s) of launches in "
        f"turn. Efficiency is the ideal time, from that of {base} worker(s), over the time it "
        f"took; with more workers than the {environment.cores()} cores it must fall."
    )
    columns = ["workers", "weak: ms", "efficiency", "strong: ms", "efficiency"]
    return Report(
        "scaling",
        [about],
        {
            **environment.describe(model=settings.model),
            "ranks": ", ".join(map(str, settings.sizes)),
            "ranks per core": ", ".join(
                f"{size / environment.cores():.2g}" for size in settings.sizes
            ),
            "threads per rank": 1,
            "launch": "horovodrun over Gloo",
        },
        [Table("Scaling", columns, rows)],
        [Chart("Efficiency", "lines", list(taken), efficiencies, "workers", marked=1.0)],
        {
            "settings": {**vars(settings), "sizes": list(settings.sizes)},
            "seconds": {str(size): dict(kinds) for size, kinds in taken.items()},
            "efficiency": numbers,
        },
    )
