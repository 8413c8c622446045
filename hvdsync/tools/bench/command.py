"""The commands below ``python -m hvdsync bench``: options in, a report out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import rich_click as click

from hvdsync.errors import HvdsyncError
from hvdsync.tools.bench.models import MODELS
from hvdsync.tools.bench.option_types import LINKS, MODEL, MODEL_NAMES, NUMBERS
from hvdsync.tools.bench.report import Report

_ROUNDS = "How often all take turns; ratios are those of the same round."

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
    _need_several("updates", "horovodrun --mpi")
    from hvdsync.tools.bench.updates import Settings, measure

    report(measure(Settings(**options)).report(), out)  # type: ignore[arg-type]


@command.command("step")
@click.option(
    "--framework", type=click.Choice(["torch", "tensorflow"]), default="torch", show_default=True
)
@click.option(
    "--models",
    type=MODEL_NAMES,
    default=",".join(MODELS),
    show_default=True,
    help="Which, with commas between.",
)
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help=_ROUNDS)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=0.15,
    show_default=True,
    help="How long one turn is, about.",
)
@click.option("--quick", is_flag=True, help="Two models and ten rounds.")
@to_directory
def step(
    framework: str,
    models: tuple[str, ...],
    rounds: int,
    seconds: float,
    quick: bool,
    out: Path | None,
) -> None:
    """Time of a training step beside raw Horovod, DDP and a process that talks to nobody.

    Start it with `horovodrun -np 2 python -m hvdsync bench step`.
    """
    from hvdsync.tools.bench.step import Settings, measure

    if quick:
        models, rounds = ("mlp", "deep"), 10
    report(measure(Settings(framework, models, rounds, seconds)), out)


@command.command("allreduce")
@click.option(
    "--largest",
    type=click.FloatRange(2**-10),
    default=64.0,
    show_default=True,
    metavar="MB",
    help="The largest size; others are a quarter each of the next, from 1 KB on.",
)
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help=_ROUNDS)
@click.option("--quick", is_flag=True, help="Up to 4 MB, and ten rounds.")
@to_directory
def allreduce(largest: float, rounds: int, quick: bool, out: Path | None) -> None:
    """Time and bus bandwidth of one all-reduce by Horovod, torch.distributed and mpi4py.

    Start it with `horovodrun -np 2 python -m hvdsync bench allreduce`; over MPI, where mpi4py takes
    part, with `horovodrun --mpi -np 2 ...`.
    """
    _need_several("allreduce")
    from hvdsync.tools.bench.allreduce import KILOBYTE, SIZES, Settings, measure

    if quick:
        largest, rounds = min(largest, 4.0), 10
    sizes = [size for size in SIZES if size <= largest * KILOBYTE**2]
    report(measure(Settings(sizes, rounds)), out)


@command.command("scaling")
@click.option("--model", type=MODEL, default="mlp", show_default=True)
@click.option(
    "--workers", type=NUMBERS, default="1,2,4", show_default=True, help="How many, with commas."
)
@click.option("--rounds", type=click.IntRange(1), default=6, show_default=True, help=_ROUNDS)
@click.option("--quick", is_flag=True, help="Three rounds.")
@to_directory
def scaling(
    model: str, workers: tuple[int, ...], rounds: int, quick: bool, out: Path | None
) -> None:
    """Weak and strong scaling on this machine; launches its workers itself."""
    _need_no_launcher("scaling")
    from hvdsync.tools.bench.scaling import Settings, measure

    report(measure(Settings(model, workers, min(rounds, 3) if quick else rounds)), out)


@command.command("startup")
@click.option(
    "--framework", type=click.Choice(["torch", "tensorflow"]), default="torch", show_default=True
)
@click.option("--workers", type=click.IntRange(1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=6, show_default=True, help=_ROUNDS)
@click.option("--quick", is_flag=True, help="Three rounds.")
@to_directory
def startup(framework: str, workers: int, rounds: int, quick: bool, out: Path | None) -> None:
    """Seconds to import, initialise and take a first step; launches its workers itself."""
    _need_no_launcher("startup")
    from hvdsync.tools.bench.startup import Settings, measure

    report(measure(Settings(framework, workers, min(rounds, 3) if quick else rounds)), out)


@command.command("checkpoint")
@click.option("--model", type=MODEL, default="wide", show_default=True)
@click.option("--every", type=click.IntRange(1), default=200, show_default=True, help="Steps.")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True, help=_ROUNDS)
@click.option(
    "--directory",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Write below this folder, in place of the system's temporary one.",
)
@click.option("--quick", is_flag=True, help="A small model, 50 steps, six rounds.")
@to_directory
def checkpoint(
    model: str, every: int, rounds: int, directory: Path | None, quick: bool, out: Path | None
) -> None:
    """What saving costs at once and in the background; alone, or on workers that were started."""
    from hvdsync.tools.bench.checkpoint import Settings, measure

    if quick:
        model, every, rounds = "mlp", min(every, 50), min(rounds, 6)
    report(measure(Settings(model, every, rounds, directory)), out)


@command.command("guard")
@click.option("--model", type=MODEL, default="mlp", show_default=True)
@click.option("--every", type=click.IntRange(1), default=100, show_default=True, help="Steps.")
@click.option("--rounds", type=click.IntRange(1), default=12, show_default=True, help=_ROUNDS)
@click.option("--quick", is_flag=True, help="Six rounds.")
@to_directory
def guard(model: str, every: int, rounds: int, quick: bool, out: Path | None) -> None:
    """What guards and the split of times cost; alone, or on workers that were started."""
    from hvdsync.tools.bench.guard import Settings, measure

    report(measure(Settings(model, every, min(rounds, 6) if quick else rounds)), out)


@command.command("control")
@click.option(
    "--ranks",
    type=NUMBERS,
    default="2,4,8,16",
    show_default=True,
    help="How many ranks are started in turn, with commas between.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=30,
    show_default=True,
    help="How often each is called; the table has medians.",
)
@click.option("--over", type=click.Choice(["gloo", "mpi"]), default="gloo", show_default=True)
@to_directory
def control(ranks: tuple[int, ...], repeats: int, over: str, out: Path | None) -> None:
    """What grows with the number of ranks: start, agreement, fingerprints, checkpoints.

    It starts its ranks itself: `python -m hvdsync bench control`.
    """
    _need_no_launcher("control")
    from hvdsync.tools.bench.control import Settings, measure

    report(measure(Settings(ranks, repeats, over)), out)


def _need_several(name: str, launcher: str = "horovodrun") -> None:
    from hvdsync.comm.launch import detect

    launch = detect()
    if launch is None or launch.size == 1:
        raise HvdsyncError(
            f"bench {name}: it takes several workers, found one; start it with "
            f"`{launcher} -np 2 python -m hvdsync bench {name}`"
        )


def _need_no_launcher(name: str) -> None:
    from hvdsync.comm.launch import detect

    if (launch := detect()) is not None:
        raise HvdsyncError(
            f"bench {name}: it launches its workers itself, found rank {launch.rank} of "
            f"{launch.launcher}; start it with `python -m hvdsync bench {name}`"
        )


def report(made: Report, out: Path | None) -> None:
    """Show and keep a report, once for all workers."""
    from hvdsync.comm.launch import detect
    from hvdsync.tools.bench.report import finish

    launch = detect()
    if launch is None or launch.rank == 0:
        finish(made, out)


@command.command("link")
@click.option(
    "--link",
    "links",
    type=LINKS,
    default="100Mbit,1Gbit,loopback",
    show_default=True,
    help="Rates such as [b]100Mbit[/], or [b]loopback[/], with commas between.",
)
@click.option("--model", type=MODEL, default="mlp", show_default=True)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="How often all take turns; the table has medians.",
)
@click.option("--quick", is_flag=True, help="200 Mbit/s and loopback only, in fewer rounds.")
@to_directory
def link(out: Path | None, links: tuple[float | None, ...], quick: bool, **options: Any) -> None:
    """Update rules and compressions between two hosts, made on this machine, with a slow link.

    Needs root, and the programs [b]ip[/], [b]tc[/] and [b]ssh[/]. Start it without a launcher.
    """
    from hvdsync.tools.bench import link as bench

    if quick:
        links, options["rounds"] = (200e6, None), min(options["rounds"], 3)
    report(bench.measure(bench.Settings(links=links, **options)).report(), out)
