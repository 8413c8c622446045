"""What grows with the number of ranks: settings in, times by number of ranks and their growth out.

Starts itself on this machine with each number of ranks in turn; nothing here moves much data.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hvdsync.launch import run
from hvdsync.tools.bench import environment
from hvdsync.tools.bench.growth import Growth, fit
from hvdsync.tools.bench.report import Chart, Report, Table

START = "start to the end of init"
INIT = "init"
_WARM_UP = 3


@dataclass(frozen=True)
class Settings:
    """What is measured; see ``python -m hvdsync bench control --help``."""

    ranks: Sequence[int] = (2, 4, 8, 16)
    repeats: int = 30
    over: str = "gloo"


def measure(settings: Settings) -> Report:
    """Start each number of ranks in turn, and time what they agree upon."""
    measured: dict[int, Mapping[str, float]] = {}
    for ranks in settings.ranks:
        began = time.time()
        told = run(
            _on_rank,
            (began, settings.repeats),
            np=ranks,
            over=settings.over,  # type: ignore[arg-type]
            env={"OMP_NUM_THREADS": "1"},
            start_timeout_seconds=600,
        )
        # The last rank is the one that all wait for.
        measured[ranks] = {name: max(one[name] for one in told) for name in told[0]}
    return make_report(settings, measured)


def _on_rank(began: float, repeats: int) -> dict[str, float]:
    import torch

    import hvdsync.torch as hvd
    from hvdsync.comm import verbs

    before = time.perf_counter()
    hvd.init()
    took = {START: time.time() - began, INIT: time.perf_counter() - before}
    torch.set_num_threads(1)
    one = torch.ones(1)
    model = torch.nn.Linear(64, 64)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    with tempfile.TemporaryDirectory(prefix="hvdsync-bench-") as folder:
        folder = verbs.broadcast_object(folder, 0)
        checkpoint = hvd.Checkpoint(folder, keep=1)
        operations: dict[str, Callable[[int], Any]] = {
            "a tensor's first reduction": lambda i: hvd.allreduce(one, name=f"control.{i}"),
            "a tensor's next reduction": lambda i: hvd.allreduce(one, name="control"),
            "agree_any": lambda i: verbs.agree_any(False),
            "check_replicas, 4,160 parameters": lambda i: hvd.check_replicas(model),
            "Checkpoint.save, 4,160 parameters": lambda i: checkpoint.save(i, model=model),
        }
        for name, operation in operations.items():
            took[name] = _time(operation, repeats)
        checkpoint.close()
        verbs.agree_any(False)  # nobody's files go before all are done
    hvd.shutdown()
    return took


def _time(operation: Callable[[int], Any], repeats: int) -> float:
    """Seconds of one call, the median; each call waits for all ranks."""
    seconds = []
    for i in range(_WARM_UP + repeats):
        before = time.perf_counter()
        operation(i)
        seconds.append(time.perf_counter() - before)
    return median(seconds[_WARM_UP:])


def make_report(settings: Settings, measured: Mapping[int, Mapping[str, float]]) -> Report:
    """The report of what was measured: ranks to seconds by name."""
    cores = environment.cores()
    ranks = list(measured)
    names = list(measured[ranks[0]])
    # Ranks that share a core take turns: their times hold the work of all of them.
    crowds = [max(1.0, one / cores) for one in ranks]
    raw = {name: [measured[one][name] for one in ranks] for name in names}
    alone = {
        name: [seconds / crowd for seconds, crowd in zip(raw[name], crowds, strict=True)]
        for name in names
    }
    growths = {name: (fit(ranks, raw[name]), fit(ranks, alone[name])) for name in names}
    table = Table(
        "Milliseconds of one call, of the rank that took longest",
        ["", *(f"{one} ranks" for one in ranks), "growth", "growth with a core for each"],
        [_row(name, raw[name], *growths[name]) for name in names],
        [
            f"{cores} core(s): the last column divides by the number of ranks on each, which is "
            "right where work rules and too kind where ranks only wait."
        ],
    )
    chart = Chart(
        "Milliseconds of one call",
        "lines",
        ranks,
        {name: [1000 * seconds for seconds in raw[name]] for name in names if name != START},
        x_label="ranks on this machine",
        x_scale="log",
        y_scale="log",
    )
    about = [
        f"What grows with the number of ranks, over {settings.over}, PyTorch: medians of "
        f"{settings.repeats} calls, in one launch for each number of ranks."
    ]
    numbers = {
        "settings": {**vars(settings), "ranks": ranks},
        "seconds": {str(one): dict(measured[one]) for one in ranks},
        "growth": {
            name: {"as measured": vars(whole), "with a core for each": vars(own)}
            for name, (whole, own) in growths.items()
        },
    }
    described = environment.describe(ranks=", ".join(map(str, ranks)), framework="torch")
    return Report("control", about, described, [table], [chart], numbers)


def _row(name: str, seconds: Sequence[float], whole: Growth, own: Growth) -> list[str]:
    told = [f"{1000 * one:,.{0 if one >= 1 else 2}f}" for one in seconds]
    return [name, *told, str(whole), str(own)]
