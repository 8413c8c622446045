"""What watching costs: steps without a guard, with one, and with the split of each rank's time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdsync.tools.bench import environment
from hvdsync.tools.bench.compared import Compared
from hvdsync.tools.bench.report import Report
from hvdsync.tools.bench.turns import take_turns

_NONE = "no guard"


@dataclass(frozen=True)
class Settings:
    """What is measured; see ``python -m hvdsync bench guard --help``."""

    model: str = "mlp"
    every: int = 100
    rounds: int = 12


def measure(settings: Settings) -> Report:
    """Time ``every`` steps at a go, so that each turn has its comparison; collective."""
    import hvdsync.torch as hvd

    hvd.init()
    steps = {
        _NONE: _steps(settings, None),
        "gradients judged": _steps(settings, hvd.Guard(every=2**31)),
        "and replicas compared": _steps(settings, hvd.Guard(every=settings.every)),
        "and times split": _steps(
            settings,
            hvd.Guard(every=settings.every),
            hvd.Stragglers(settings.every, tell=lambda *_: None).step,
        ),
    }
    seconds = take_turns(steps, rounds=settings.rounds, seconds=1e-9, first=_NONE)
    ranks = hvd.size()
    hvd.shutdown()
    return make_report(settings, Compared(seconds, _NONE), ranks)


def _steps(
    settings: Settings, guard: Any, after: Callable[[], object] | None = None
) -> Callable[[], None]:
    import torch

    import hvdsync.torch as hvd
    from hvdsync.tools.bench import torch_models

    model = torch_models.make(settings.model)
    batch = torch_models.batch_for(settings.model, seed=hvd.rank())
    model, optimizer = hvd.distribute(
        model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), guard=guard
    )

    step = torch_models.training_step(model, optimizer, batch)

    def steps() -> None:
        for _ in range(settings.every):
            step()
            if after is not None:
                after()

    return steps


def make_report(settings: Settings, compared: Compared, ranks: int) -> Report:
    """The report of what was measured."""
    about = (
        f"Steps of {settings.model} in PyTorch, {ranks} worker(s); replicas compared and times "
        f"exchanged every {settings.every} steps. Medians of {settings.rounds} rounds in which all "
        "took turns; a ratio that noise hides is not told."
    )
    return Report(
        "guard",
        [about],
        environment.describe(model=settings.model),
        [compared.table("A training step", per=settings.every)],
        [compared.chart("Time of a step over one without a guard")],
        {"settings": vars(settings), "ranks": ranks, **compared.numbers()},
    )
