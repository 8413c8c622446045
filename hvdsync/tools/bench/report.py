"""What a benchmark tells: tables, charts and all numbers in; terminal, JSON, plots and a page out.

Every benchmark makes one :class:`Report`, so that all of them look and are kept alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table as RichTable

from hvdsync.errors import HvdsyncError

_WIDTH = 118


@dataclass(frozen=True)
class Table:
    """Cells as they are read, the first of a row being what the row is about."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """Values of each series over ``x``; None is left out.

    Bars and rows, which are bars that lie, have names in ``x``, lines numbers. ``marked`` is a
    value to compare with.
    """

    title: str
    kind: Literal["bars", "rows", "lines"]
    x: Sequence[Any]
    series: Mapping[str, Sequence[float | None]]
    x_label: str = ""
    y_label: str = ""
    x_scale: Literal["linear", "log"] = "linear"
    y_scale: Literal["linear", "log"] = "linear"
    marked: float | None = None


@dataclass(frozen=True)
class Report:
    """One benchmark's result. ``numbers`` is everything that was measured, for JSON."""

    name: str
    about: Sequence[str]
    environment: Mapping[str, Any]
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)


def show(report: Report, console: Console | None = None) -> None:
    """Print what the benchmark is about, and its tables."""
    # A launcher gives ranks a terminal that is none.
    console = console or Console(width=_WIDTH, highlight=False, color_system=None)
    for line in report.about:
        console.print(line)
    for told in report.tables:
        table = RichTable(title=told.title or None, title_justify="left")
        for i, column in enumerate(told.columns):
            table.add_column(column, justify="right" if i else "left", no_wrap=not i)
        for row in told.rows:
            table.add_row(*row)
        console.print(table)
        for note in told.notes:
            console.print(note)


def write(report: Report, directory: Path) -> list[Path]:
    """Write ``<name>.json``, a plot ``<name>-<i>.svg`` of each chart and ``<name>.html``.

    The page needs no other file and no network. Raises ``HvdsyncError`` where the packages that
    draw are missing; the JSON file is there then.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = [directory / f"{report.name}.json"]
    kept = {"environment": dict(report.environment), **report.numbers}
    written[0].write_text(json.dumps(kept, indent=1) + "\n")
    try:
        from hvdsync.tools.bench import page, plots
    except ImportError as error:
        raise HvdsyncError(
            f"{written[0]} is written; plots and the page need {error.name}, which is not "
            "installed: `pip install 'hvdsync[bench]'`"
        ) from error
    drawings = [plots.draw(chart) for chart in report.charts]
    for i, drawing in enumerate(drawings):
        written.append(directory / f"{report.name}-{i}.svg")
        written[-1].write_text(drawing)
    written.append(directory / f"{report.name}.html")
    written[-1].write_text(page.render(report, drawings))
    return written


def finish(report: Report, directory: Path | None, console: Console | None = None) -> None:
    """Show a report, and write it where a directory is given."""
    show(report, console)
    if directory is not None:
        written = ", ".join(path.name for path in write(report, directory))
        (console or Console(width=_WIDTH, highlight=False, color_system=None)).print(
            f"{directory}: {written}"
        )
