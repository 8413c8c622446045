"""What ``bench updates`` makes of runs, and what it asks of who starts it."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from hvdsync.tools import cli
from hvdsync.tools.bench.report import show, write
from hvdsync.tools.bench.updates import Measured, Run, Settings


def runs(*values: tuple[list[int], float, float]) -> list[Run]:
    return [Run(steps, seconds, accuracy) for steps, seconds, accuracy in values]


MEASURED = Measured(
    Settings(seconds=30, samples=1000, rounds=3),
    ranks=2,
    step_seconds=0.005,
    of_equal_time={
        "synchronous": runs(([50, 50], 30, 0.9), ([60, 60], 30, 0.91), ([70, 70], 30, 0.8)),
        "asynchronous": runs(([60, 540], 30, 0.95), ([60, 240], 30, 0.94), ([9, 9], 30, 0.5)),
    },
    of_equal_samples={
        "synchronous": runs(([8, 8], 2, 0.7), ([8, 8], 4, 0.8), ([8, 8], 3, 0.75)),
        "asynchronous": runs(([8, 8], 1, 0.6), ([8, 8], 2, 0.7), ([8, 8], 9, 0.65)),
    },
)


def test_the_table_has_medians_and_ratios_to_the_first_rule() -> None:
    output = io.StringIO()
    show(MEASURED, Console(file=output, width=200))
    text = output.getvalue()
    assert "a step takes 5 ms, worker 0 sleeps 20 ms" in text
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert rows == [
        ["synchronous", "240", "1.00", "50%", "90.00%", "75.00%", "3.0"],
        ["asynchronous", "600", "2.50", "20%", "94.00%", "65.00%", "2.0"],
    ]


def test_every_run_is_kept(tmp_path: Path) -> None:
    write(MEASURED, tmp_path / "updates.json")
    kept = json.loads((tmp_path / "updates.json").read_text())
    assert kept["settings"]["samples"] == 1000 and kept["ranks"] == 2
    assert kept["of_equal_time"]["asynchronous"][1] == {
        "steps": [60, 240],
        "seconds": 30,
        "accuracy": 0.94,
    }
    assert len(kept["of_equal_samples"]["synchronous"]) == 3


def test_one_worker_has_nobody_to_wait_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "updates"])
    assert end.value.code == 1
    assert "`horovodrun --mpi -np 2 python -m hvdsync bench updates`" in capsys.readouterr().err
