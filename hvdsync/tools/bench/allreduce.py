"""One all-reduce of each size by each library, in turns on the ranks that were started.

Sizes in; times, bus bandwidth and ratios to Horovod out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from hvdsync.comm import launch, verbs
from hvdsync.errors import LaunchError
from hvdsync.tools.bench import environment
from hvdsync.tools.bench.ratios import paired
from hvdsync.tools.bench.report import Chart, Report, Table
from hvdsync.tools.bench.turns import take_turns

KILOBYTE = 1024
SIZES = tuple(KILOBYTE * 4**i for i in range(9))  # up to 64 MB
_PROCESS_GROUP, _MPI4PY = "torch.distributed, gloo", "mpi4py"


@dataclass(frozen=True)
class Settings:
    """What is measured; see ``python -m hvdsync bench allreduce --help``. Sizes are in bytes."""

    sizes: Sequence[int] = SIZES
    rounds: int = 20
    seconds: float = 0.1


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Bytes per second that a link carries, as nccl-tests define it for an all-reduce.

    The size over the time, times 2 (N - 1) / N: what a ring of N ranks has each of them send.
    """
    return size / seconds * 2 * (ranks - 1) / ranks


def measure(settings: Settings) -> Report:
    """Time float32 sums in place on the ranks that were started; collective."""
    from hvdsync.tools.bench import step_torch

    step_torch.start()
    ranks = verbs.size()
    started = launch.detect()
    over = "Gloo" if started is None or started.launcher == "horovodrun" else "MPI"
    horovod = f"Horovod over {over}"
    seconds = {}
    for size in settings.sizes:
        steps = _libraries(size, horovod)
        seconds[size] = take_turns(
            steps, rounds=settings.rounds, seconds=settings.seconds, first=horovod
        )
    step_torch.stop()
    return make_report(seconds, horovod, ranks)


def _libraries(size: int, horovod_name: str) -> dict[str, Callable[[], object]]:
    import torch
    import torch.distributed as dist

    from hvdsync.comm import horovod, windows

    raw: Any = horovod.load("torch")
    elements = size // 4
    # Zeros: sums of sums stay what they are.
    first, second = torch.zeros(elements), torch.zeros(elements)
    name = f"bench.allreduce.{size}"
    steps: dict[str, Callable[[], object]] = {
        horovod_name: lambda: raw.allreduce_(first, op=raw.Sum, name=name),
        _PROCESS_GROUP: lambda: dist.all_reduce(second),
    }
    try:
        connection = windows.connect()
    except LaunchError:
        return steps
    from mpi4py import MPI

    third = np.zeros(elements, np.float32)
    steps[_MPI4PY] = lambda: connection.Allreduce(MPI.IN_PLACE, third, MPI.SUM)
    return steps


def make_report(
    seconds: Mapping[int, Mapping[str, Sequence[float]]], horovod: str, ranks: int
) -> Report:
    """The report of times by size, library and round."""
    sizes = list(seconds)
    names = list(seconds[sizes[0]])
    others = [name for name in names if name != horovod]
    times, bandwidths, ratios = [], [], []
    for size, measured in seconds.items():
        medians = {name: median(measured[name]) for name in names}
        told = [bus_bandwidth(size, medians[name], ranks) / 1e9 for name in names]
        times.append([_words(size), *(f"{1000 * medians[name]:.3g}" for name in names)])
        bandwidths.append([_words(size), *(f"{value:.3g}" for value in told)])
        compared = {name: paired(measured[name], measured[horovod]) for name in others}
        ratios.append([_words(size), *map(str, compared.values())])
    about = (
        f"Sums of float32 in place, {ranks} workers. Medians of rounds in which all took turns. "
        "Bus bandwidth as nccl-tests define it: size / time * 2 (N - 1) / N."
    )
    tables = [
        Table("Milliseconds of one all-reduce", ["size", *names], times),
        Table("Bus bandwidth, GB/s", ["size", *names], bandwidths),
        Table(f"Time over that of {horovod}", ["size", *others], ratios),
    ]
    lines: dict[str, list[float | None]] = {
        name: [bus_bandwidth(size, median(seconds[size][name]), ranks) / 1e9 for size in sizes]
        for name in names
    }
    chart = Chart(
        *("Bus bandwidth", "lines", sizes, lines, "bytes", "GB/s"),
        x_scale="log",
        y_scale="log",
    )
    numbers = {
        "ranks": ranks,
        "seconds": {str(size): dict(measured) for size, measured in seconds.items()},
        "bus bandwidth in GB/s": {
            name: dict(zip(sizes, lines[name], strict=True)) for name in names
        },
    }
    return Report("allreduce", [about], environment.describe(), tables, [chart], numbers)


def _words(size: int) -> str:
    return f"{size // KILOBYTE} KB" if size < KILOBYTE**2 else f"{size // KILOBYTE**2} MB"
