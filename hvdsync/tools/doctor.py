"""``python -m hvdsync doctor``: what is found here, what works, and a cure for what does not.

In: this machine. Out: one screen or JSON; exit code 1 when something needed is broken.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import rich_click as click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hvdsync.tools.diagnosis.findings import Findings, gather
from hvdsync.tools.diagnosis.verdicts import Status, Verdict, is_broken, judge

_SIGNS = {
    Status.OK: "[green]ok[/]",
    Status.NOTE: "[dim]--[/]",
    Status.WARNING: "[yellow]warning[/]",
    Status.BROKEN: "[bold red]broken[/]",
}


def report(verdicts: list[Verdict], console: Console) -> None:
    """Print the verdicts as one table and a last line."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for verdict in verdicts:
        text = escape(verdict.text)
        if verdict.cure:
            text += f"\n[cyan]-> {escape(verdict.cure)}[/]"
        table.add_row(_SIGNS[verdict.status], verdict.topic, text)
    console.print(table)
    count = sum(verdict.status is Status.BROKEN for verdict in verdicts)
    warnings = sum(verdict.status is Status.WARNING for verdict in verdicts)
    if count:
        console.print(f"\n[bold red]{count} broken[/], {warnings} warnings.")
    else:
        console.print(f"\n[green]Nothing needed is broken[/], {warnings} warnings.")


def as_json(findings: Findings, verdicts: list[Verdict]) -> dict[str, Any]:
    """Findings and verdicts as values that JSON can hold."""
    return {
        "ok": not is_broken(verdicts),
        "verdicts": [asdict(verdict) for verdict in verdicts],
        "findings": json.loads(json.dumps(asdict(findings), default=str)),
    }


@click.command("doctor")
@click.option("--json", "use_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--quick", is_flag=True, help="Only look; do not try Horovod.")
@click.pass_context
def command(context: click.Context, use_json: bool, quick: bool) -> None:
    """Say what is found, what works, and how to mend what does not.

    Under a launcher rank 0 speaks, and those where something is broken.
    """
    console = Console()
    if use_json or quick or not console.is_terminal:
        findings = gather(try_horovod=not quick)
    else:
        with console.status("looking, and trying one all-reduce per framework"):
            findings = gather()
    verdicts = judge(findings)
    if findings.launch is not None and findings.launch.rank and not is_broken(verdicts):
        return
    if use_json:
        click.echo(json.dumps(as_json(findings, verdicts), indent=1))
    else:
        report(verdicts, console)
    context.exit(1 if is_broken(verdicts) else 0)
