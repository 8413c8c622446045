"""What ``bench updates`` shows and keeps: measured runs in, a table and a JSON file out."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from hvdsync.tools.bench.updates import Measured, Run

_WIDTH = 110


def show(measured: Measured, console: Console | None = None) -> None:
    """Print the table: medians over rounds, ratios to the first rule."""
    settings = measured.settings
    # A launcher gives ranks a terminal that is none.
    console = console or Console(width=_WIDTH, highlight=False, color_system=None)
    slow = settings.slow * measured.step_seconds
    console.print(
        f"{measured.ranks} workers, {settings.dataset}, batches of {settings.batch_size}; a step "
        f"takes {1000 * measured.step_seconds:.3g} ms, worker 0 sleeps {1000 * slow:.3g} ms in "
        f"each of its own. Medians of {settings.rounds} round(s), in which rules took turns."
    )
    table = Table()
    table.add_column("update rule", no_wrap=True)
    for title in (
        "steps per minute",
        "ratio",
        "of worker 0",
        f"accuracy after {settings.seconds:g} s",
        f"accuracy after {settings.samples:,} samples",
        "seconds for them",
    ):
        table.add_column(title, justify="right")
    first = next(iter(measured.of_equal_time))
    base = _median(measured.of_equal_time[first], lambda run: run.steps_per_minute)
    for name, timed in measured.of_equal_time.items():
        counted = measured.of_equal_samples[name]
        rate = _median(timed, lambda run: run.steps_per_minute)
        table.add_row(
            name,
            f"{rate:,.0f}",
            f"{rate / base:.2f}",
            f"{_median(timed, lambda run: run.steps[0] / sum(run.steps)):.0%}",
            f"{_median(timed, lambda run: run.accuracy):.2%}",
            f"{_median(counted, lambda run: run.accuracy):.2%}",
            f"{_median(counted, lambda run: run.seconds):.1f}",
        )
    console.print(table)


def write(measured: Measured, path: Path) -> None:
    """Write every run, and what was measured, as JSON."""
    path.write_text(json.dumps(measured.as_dict(), indent=1) + "\n")


def _median(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    return median(map(value, runs))
