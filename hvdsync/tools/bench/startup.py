"""From the launch to the first step: with hvdsync, and with raw Horovod in its place.

Launches in turn; the times at which each rank came from one point to the next.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from hvdsync.tools.bench import environment
from hvdsync.tools.bench.contenders import HVDSYNC, RAW
from hvdsync.tools.bench.ratios import paired
from hvdsync.tools.bench.report import Chart, Report, Table

PARTS = ("launch", "import", "init", "first step")


@dataclass(frozen=True)
class Settings:
    """What is measured; see ``python -m hvdsync bench startup --help``."""

    framework: str = "torch"
    workers: int = 2
    rounds: int = 6


def measure(settings: Settings) -> Report:
    """Launch in turns; raises :class:`RunFailed` when a rank fails."""
    import hvdsync

    taken: dict[str, list[dict[str, float]]] = {HVDSYNC: [], RAW: []}
    function = {"torch": reach_a_step_of_torch, "tensorflow": reach_a_step_of_tensorflow}
    for _ in range(settings.rounds):
        for name, runs in taken.items():
            started = time.time()
            marks = hvdsync.run(
                function[settings.framework],
                (name == RAW,),
                np=settings.workers,
                env={"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
            )
            # Of the rank that came last to each point.
            last = [started, *(max(of_ranks) for of_ranks in zip(*marks, strict=True))]
            runs.append(dict(zip(PARTS, (b - a for a, b in pairwise(last)), strict=True)))
    return make_report(settings, taken)


def reach_a_step_of_torch(raw: bool) -> list[float]:
    """On one rank: the times (Unix) when it ran, had imported, was initialised, had stepped."""
    marks = [time.time()]
    import torch

    if raw:
        import horovod.torch as hvd
    else:
        import hvdsync.torch as hvd
    marks.append(time.time())
    hvd.init()
    marks.append(time.time())
    model = torch.nn.Linear(784, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if raw:
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        model, optimizer = hvd.distribute(model, optimizer)
    model(torch.rand(8, 784)).sum().backward()
    optimizer.step()
    marks.append(time.time())
    hvd.shutdown()
    return marks


def reach_a_step_of_tensorflow(raw: bool) -> list[float]:
    """As :func:`reach_a_step_of_torch`."""
    marks = [time.time()]
    import tensorflow as tf

    if raw:
        import horovod.tensorflow as hvd
    else:
        import hvdsync.tensorflow as hvd
    marks.append(time.time())
    hvd.init()
    marks.append(time.time())
    weight = tf.Variable(tf.random.normal((784, 10)))
    hvd.broadcast_variables([weight], root_rank=0)

    @tf.function
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ weight)
        (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
        weight.assign_sub(0.01 * gradient)

    step(tf.random.normal((8, 784)))
    marks.append(time.time())
    hvd.shutdown()
    return marks


def make_report(settings: Settings, taken: Mapping[str, Sequence[Mapping[str, float]]]) -> Report:
    """The report of seconds by what was started, round and part."""
    wholes = {name: [sum(run.values()) for run in runs] for name, runs in taken.items()}
    ratio = paired(wholes[HVDSYNC], wholes[RAW])
    rows = [
        [
            name,
            *(f"{median(run[part] for run in runs):.2f}" for part in PARTS),
            f"{median(wholes[name]):.2f}",
        ]
        for name, runs in taken.items()
    ]
    rows.append(["hvdsync / raw Horovod", *[""] * len(PARTS), str(ratio)])
    about = (
        f"Seconds until the last of {settings.workers} worker(s) came to each point, "
        f"{settings.framework}; medians of {settings.rounds} round(s) in turn. Raw Horovod is the "
        "one installed here, under the same launcher, which as published takes seconds more."
    )
    charted: dict[str, list[float | None]] = {
        name: [median(run[part] for run in runs) for part in PARTS] for name, runs in taken.items()
    }
    return Report(
        "startup",
        [about],
        {
            **environment.describe(framework=settings.framework),
            "ranks": settings.workers,
            "ranks per core": round(settings.workers / environment.cores(), 2),
            "threads per rank": 1,
            "launch": "horovodrun over Gloo",
        },
        [Table("From the launch to the first step, s", ["", *PARTS, "in all"], rows)],
        [Chart("Seconds", "bars", list(PARTS), charted)],
        {
            "settings": vars(settings),
            "seconds": {name: [dict(run) for run in runs] for name, runs in taken.items()},
            "hvdsync over raw Horovod": ratio.as_dict(),
        },
    )
