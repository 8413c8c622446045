"""What benchmarks make of what was measured: ratios, tables, JSON, plots and a page."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from hvdsync.tools import cli
from hvdsync.tools.bench.ratios import paired
from hvdsync.tools.bench.report import Chart, Report, Table, show, write
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
    show(MEASURED.report(), Console(file=output, width=200))
    text = output.getvalue()
    assert "a step takes 5 ms, worker 0 sleeps 20 ms" in text
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    assert rows == [
        ["synchronous", "240", "1.00", "50%", "90.00%", "75.00%", "3.0"],
        ["asynchronous", "600", "2.50", "20%", "94.00%", "65.00%", "2.0"],
    ]


def test_every_run_is_kept(tmp_path: Path) -> None:
    write(MEASURED.report(), tmp_path)
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


def test_a_ratio_is_the_median_of_pairs_with_its_interval() -> None:
    ratio = paired([2.0, 2.2, 2.1, 1.9, 2.0, 2.1, 2.0, 2.0], [1.0] * 8)
    # Of eight pairs the interval of 95 % is from the lowest to the highest (0.8 % outside).
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 1.9, 2.2)
    assert str(ratio) == "2.00 (1.90-2.20)"
    # Of twenty the sixth from either end encloses it (4.1 % outside).
    ratio = paired(list(range(1, 21)), [1.0] * 20)
    assert (ratio.low, ratio.high) == (6, 15)


def test_a_ratio_that_noise_hides_is_not_told() -> None:
    ratio = paired([1.0, 2.0, 3.0], [1.0, 1.0, 1.0])
    assert not ratio.is_meaningful
    assert str(ratio) == "noise (1.00-3.00)"
    assert ratio.as_dict()["median"] is None


def test_the_page_holds_tables_and_plots_and_asks_for_no_other_file(tmp_path: Path) -> None:
    report = Report(
        "step",
        ["About <this>."],
        {"cores": 2},
        [Table("Times", ["mode", "ms"], [["plain", "1.5"]], ["A note."])],
        [
            Chart("Bars", "bars", ["a", "b"], {"plain": [1.0, None]}, marked=1.0),
            Chart("Lines", "lines", [1, 2], {"plain": [1.0, 2.0]}, x_scale="log"),
        ],
        {"times": [1.5]},
    )
    written = write(report, tmp_path / "new")
    assert [p.name for p in written] == ["step.json", "step-0.svg", "step-1.svg", "step.html"]
    assert json.loads(written[0].read_text()) == {"environment": {"cores": 2}, "times": [1.5]}
    page = written[-1].read_text()
    assert "About &lt;this&gt;." in page and "<td>1.5</td>" in page and "A note." in page
    assert page.count("<svg") == 2
    assert "<script" not in page and "<link" not in page and 'src="' not in page
