"""The commands below ``python -m hvdsync bench``: options in, a table and a JSON file out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import rich_click as click

from hvdsync.errors import HvdsyncError

_F = TypeVar("_F", bound=Callable[..., Any])


def to_directory(function: _F) -> _F:
    """The option that every benchmark has: where its results are kept."""
    return click.option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder for all numbers (JSON), plots (SVG) and a page (HTML).",
    )(function)


@click.group("bench")
def command() -> None:
    """Measure what a choice costs and gives, on the workers that were started."""


@command.command("updates")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=10.0,
    show_default=True,
    help="How long each rule trains, for the comparison at equal time.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=60_000,
    show_default=True,
    help="How many samples all workers together train on, for the one at equal samples.",
)
@click.option(
    "--slow",
    type=click.FloatRange(0),
    default=4.0,
    show_default=True,
    metavar="STEPS",
    help="Worker 0 sleeps so many step times in each of its steps.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="How often all rules train in turn; the table has medians.",
)
@click.option(
    "--period",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Steps between two meetings of local SGD.",
)
@click.option(
    "--staleness",
    type=click.IntRange(0),
    default=8,
    show_default=True,
    help="The bound of the second asynchronous row.",
)
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True)
@click.option(
    "--lr",
    type=click.FloatRange(0, min_open=True),
    default=0.05,
    show_default=True,
    help="Learning rate of one worker's SGD; what averages has it times the number of workers.",
)
@click.option("--dataset", default="mnist", show_default=True, help="As of the train command.")
@to_directory
def updates(out: Path | None, **options: float | str) -> None:
    """Update rules with one slow worker: steps per minute, and accuracy at equal time and samples.

    Start it with `horovodrun --mpi -np 4 python -m hvdsync bench updates`.
    """
    from hvdsync.comm.launch import detect

    launch = detect()
    if launch is None or launch.size == 1:
        raise HvdsyncError(
            "bench updates: rules are compared on several workers, found one; start it with "
            "`horovodrun --mpi -np 2 python -m hvdsync bench updates`"
        )
    from hvdsync.tools.bench.report import finish
    from hvdsync.tools.bench.updates import Settings, measure

    measured = measure(Settings(**options))  # type: ignore[arg-type]
    if launch.rank == 0:
        finish(measured.report(), out)
