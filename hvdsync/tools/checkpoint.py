"""``python -m hvdsync checkpoint``: look at checkpoints without a framework, and without trust.

In: a directory of checkpoints, or the folder of one. Out: tables or JSON; exit code 1 for damage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import rich_click as click
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from hvdsync.errors import CheckpointError

_DIRECTORY = click.argument("directory", type=click.Path(exists=True, path_type=Path))
_JSON = click.option("--json", "use_json", is_flag=True, help="Print JSON instead of tables.")


@click.group("checkpoint")
def command() -> None:
    """List, verify and show checkpoints."""


@command.command("list")
@_DIRECTORY
@_JSON
def list_(directory: Path, use_json: bool) -> None:
    """List the checkpoints in DIRECTORY, in the order in which they were written.

    Manifests are read, files are not; `verify` reads them.
    """
    rows = [_row(folder) for folder in _folders(directory)]
    if use_json:
        click.echo(json.dumps(rows, indent=1))
        return
    table = Table(box=None)
    for heading in ("step", "epoch", "written", "ranks", "size", "holds"):
        table.add_column(heading, no_wrap=heading != "holds")
    damaged = []
    for row in rows:
        if "problem" in row:
            damaged.append(f"{row['folder']}: {row['problem']}")
            continue
        cells = (row["step"], row["epoch"], row["written"], row["ranks"], decimal(row["bytes"]))
        holds = ", ".join(row["holds"])
        table.add_row(*(escape("" if cell is None else str(cell)) for cell in (*cells, holds)))
    console = _console()
    console.print(table)
    for line in damaged:
        console.print(f"[bold red]{escape(line)}[/]")


@command.command("verify")
@_DIRECTORY
@_JSON
@click.pass_context
def verify(context: click.Context, directory: Path, use_json: bool) -> None:
    """Read every file in DIRECTORY and compare it with its SHA-256.

    Exit code 1 when anything is damaged.
    """
    from hvdsync.checkpoint.store import Store

    verdicts: dict[str, str | None] = {}
    for folder in _folders(directory):
        try:
            Store(folder.parent, 1).verify(folder)
            verdicts[str(folder)] = None
        except CheckpointError as error:
            verdicts[str(folder)] = str(error)
    if use_json:
        click.echo(json.dumps(verdicts, indent=1))
    else:
        console = _console()
        for name, problem in verdicts.items():
            said = "[green]whole[/]" if problem is None else f"[bold red]{escape(problem)}[/]"
            console.print(f"{escape(name)}  {said}")
    context.exit(1 if any(verdicts.values()) else 0)


@command.command("show")
@_DIRECTORY
@click.option("--step", type=int, show_default="the one written last", help="Which one.")
@_JSON
def show(directory: Path, step: int | None, use_json: bool) -> None:
    """Show what a checkpoint in DIRECTORY holds: values, tensors, shapes and dtypes.

    No code from its files is run, and its files are not verified.
    """
    from hvdsync.checkpoint import manifest
    from hvdsync.checkpoint.checkpoint import VALUES

    folder = _chosen(directory, step)
    about = manifest.read(folder)
    values = json.loads((folder / VALUES).read_text()) if (folder / VALUES).exists() else {}
    tensors = dict(_tensors(folder, about))
    if use_json:
        click.echo(json.dumps({**about, "values": values, "tensors": tensors}, indent=1))
        return
    console = _console()
    facts = Table.grid(padding=(0, 2))
    for key in ("step", "epoch", "written", "world_size", "hvdsync", "versions"):
        if about.get(key) is not None:
            facts.add_row(key.replace("_", " "), escape(str(about[key])))
    for key, value in values.items():
        if key in about:
            continue
        facts.add_row(escape(key), escape(json.dumps(value)))
    console.print(facts)
    for name, found in tensors.items():
        size = decimal(about["files"][name]["bytes"])
        console.print(f"\n[bold]{escape(name)}[/]  {size}")
        if isinstance(found, str):
            console.print(f"  {escape(found)}")
            continue
        table = Table.grid(padding=(0, 2))
        for tensor in found:
            shape = " x ".join(map(str, tensor["shape"])) or "scalar"
            table.add_row("", escape(tensor["name"]), shape, tensor["dtype"])
        console.print(table)


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)


def _folders(directory: Path) -> list[Path]:
    """The folders of the checkpoints in a directory, or the directory if it is one."""
    from hvdsync.checkpoint.manifest import MANIFEST
    from hvdsync.checkpoint.store import Store

    if (directory / MANIFEST).exists():
        return [directory]
    store = Store(directory, 1)
    folders = [store.folder(step) for step in store.history()]
    if not folders:
        raise CheckpointError(f"{directory} holds no checkpoint")
    return folders


def _chosen(directory: Path, step: int | None) -> Path:
    from hvdsync.checkpoint import manifest
    from hvdsync.checkpoint.store import Store

    folders = _folders(directory)
    if step is None:
        # A damaged one is only shown when it is asked for.
        return next((f for f in reversed(folders) if _reads(manifest, f)), folders[-1])
    wanted = Store(directory, 1).folder(step)
    if wanted not in folders:
        there = ", ".join(folder.name for folder in folders)
        raise CheckpointError(f"{directory} holds no step {step}; there are: {there}")
    return wanted


def _reads(manifest: Any, folder: Path) -> bool:
    try:
        manifest.read(folder)
    except CheckpointError:
        return False
    return True


def _row(folder: Path) -> dict[str, Any]:
    from hvdsync.checkpoint import manifest

    try:
        about = manifest.read(folder)
    except CheckpointError as error:
        return {"folder": folder.name, "problem": str(error)}
    return {
        "folder": folder.name,
        "step": about["step"],
        "epoch": about.get("epoch"),
        "written": about.get("written"),
        "ranks": about.get("world_size"),
        "bytes": sum(file["bytes"] for file in about["files"].values()),
        "holds": [*about.get("items", ()), *about.get("per_rank", ())],
    }


def _tensors(folder: Path, about: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each file that holds arrays: what they are, or why nothing can be said of them."""
    from hvdsync.checkpoint import contents

    for name in about["files"]:
        try:
            found = contents.tensors(folder / name)
        except CheckpointError as error:
            yield name, str(error)
            continue
        if found is not None:
            yield name, [asdict(tensor) for tensor in found]
