"""``python -m hvdsync data``: fetch a data set, or count how often each sample would be read.

In: the name of a data set, or a length and numbers of workers. Out: checked files, or a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

if TYPE_CHECKING:
    from hvdsync.data.order import Uneven


@click.group("data")
def command() -> None:
    """Fetch a data set and check it; count how often each sample is read."""


@command.command("mnist")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    show_default="the user's data folder",
    help="Where the four files are, or go.",
)
@click.option("--quiet", is_flag=True, help="No progress bar.")
def mnist(directory: Path | None, quiet: bool) -> None:
    """MNIST, four IDX files whose checksums are known."""
    from hvdsync.data.mnist import fetch

    where = fetch(directory, progress=not quiet)
    click.echo(f"MNIST is complete in {where}")


class _Resumption(click.ParamType):
    """BATCHES:WORKERS."""

    name = "BATCHES:WORKERS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        batches, _, workers = str(value).partition(":")
        if not (batches.isdecimal() and workers.isdecimal() and int(workers)):
            self.fail(f"'{value}' is not like 120:3, batches and then workers.", param, ctx)
        return int(batches), int(workers)


@command.command("coverage")
@click.argument("samples", type=click.IntRange(1))
@click.option("-n", "--workers", type=click.IntRange(1), default=1, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--uneven", type=click.Choice(["pad", "drop", "exact"]), default="pad", show_default=True
)
@click.option("--shuffle/--no-shuffle", default=True, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--epochs", type=click.IntRange(1), default=1, show_default=True)
@click.option(
    "--resume",
    "resumptions",
    type=_Resumption(),
    multiple=True,
    help="In each epoch the run is ended after so many batches of each worker, and resumed on so "
    "many workers; may be given several times.",
)
def coverage(
    samples: int,
    workers: int,
    batch_size: int,
    uneven: Uneven,
    shuffle: bool,
    seed: int,
    epochs: int,
    resumptions: Sequence[tuple[int, int]],
) -> None:
    """How often DistributedSampler gives each of SAMPLES samples."""
    from rich.console import Console
    from rich.table import Table

    from hvdsync.data.coverage import Leg, describe, simulate

    ends = [*(batches for batches, _ in resumptions), None]
    sizes = [workers, *(size for _, size in resumptions)]
    counts = simulate(
        samples,
        [Leg(size, end) for size, end in zip(sizes, ends, strict=True)],
        batch_size=batch_size,
        shuffle=shuffle,
        seed=seed,
        uneven=uneven,
        epochs=epochs,
    )
    table = Table("times read", "samples", "for instance")
    for times, number in describe(counts):
        some = (counts == times).nonzero()[0][:5]
        table.add_row(str(times), f"{number:,}", ", ".join(map(str, some)))
    Console().print(table)
