"""The command ``python -m hvdsync plan``: options in, a report out."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from hvdsync.tools.bench.command import report, to_directory
from hvdsync.tools.bench.option_types import LINKS, MODEL, NUMBERS


@click.command("plan")
@click.option("--model", type=MODEL, default="mlp", show_default=True, help="As in `bench step`.")
@click.option(
    "--workers",
    type=NUMBERS,
    default="2,8,64,512",
    show_default=True,
    help="How many, with commas.",
)
@click.option(
    "--link",
    "links",
    type=LINKS,
    default="1Gbit,25Gbit",
    show_default=True,
    help="Rates between hosts, with commas; [b]loopback[/] for all workers on this machine.",
)
@click.option("--workers-per-host", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--over",
    type=click.Choice(["gloo", "mpi"]),
    default="gloo",
    show_default=True,
    help="Gloo sends everything around a ring, MPI small things along a tree.",
)
@click.option(
    "--compute-ms",
    type=click.FloatRange(0, min_open=True),
    help="Milliseconds of a step that talks to nobody, in place of measuring it here.",
)
@click.option(
    "--latency-us",
    type=click.FloatRange(0),
    default=20.0,
    show_default=True,
    help="Microseconds of a message between two workers.",
)
@click.option(
    "--check",
    "checked",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A [b]link.json[/] of `bench link`: compare with it, and take from it what calls cost.",
)
@to_directory
def command(
    model: str,
    workers: tuple[int, ...],
    links: tuple[float | None, ...],
    workers_per_host: int,
    over: str,
    compute_ms: float | None,
    latency_us: float,
    checked: Path | None,
    out: Path | None,
) -> None:
    """Predict step time, efficiency and the best update rule and compression, before you pay.

    Computing and compressing are measured on one core of this machine, for some seconds; what
    travels is arithmetic. Start it without a launcher.
    """
    from hvdsync.tools.plan import check, costs, planned, predict

    settings = planned.Settings(
        model,
        workers,
        links,
        workers_per_host,
        over,
        latency_us / 1e6,
    )
    kept = None if checked is None else check.Kept.read(checked)
    names = sorted({choice.compression for choice in predict.CHOICES})
    machine = costs.measure(model, names, compute_ms and compute_ms / 1000, workers_per_host)
    of_kept, kept_shapes = None, []
    if kept is not None:
        of_kept = costs.measure(kept.model, names, together=check.WORKERS)
        kept_shapes = costs.shapes_of(kept.model)
    plan = planned.make(settings, machine, costs.shapes_of(model), kept, of_kept, kept_shapes)
    report(plan.report(), out)
