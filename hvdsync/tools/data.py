"""``python -m hvdsync data NAME``: fetch a data set into the user's data folder.

In: the name of the data set, perhaps a folder. Out: the files there, checked, and their path.
"""

from __future__ import annotations

from pathlib import Path

import rich_click as click


@click.group("data")
def command() -> None:
    """Fetch a data set and check it."""


@command.command("mnist")
@click.option(
    "--directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the four files are, or go.  [default: the user's data folder]",
)
@click.option("--quiet", is_flag=True, help="No progress bar.")
def mnist(directory: Path | None, quiet: bool) -> None:
    """MNIST, four IDX files whose checksums are known."""
    from hvdsync.data.mnist import fetch

    where = fetch(directory, progress=not quiet)
    click.echo(f"MNIST is complete in {where}")
