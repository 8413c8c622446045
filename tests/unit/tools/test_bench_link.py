"""What ``bench link`` makes of its options and of what was measured, and where it cannot run."""

from __future__ import annotations

import io
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from hvdsync.tools import cli
from hvdsync.tools.bench import rates
from hvdsync.tools.bench.link import Measured, OnLink, Settings, is_as_asked
from hvdsync.tools.bench.report import show, write


def on_link(rate: float | None, **milliseconds: list[float]) -> OnLink:
    times = {name: [ms / 1000 for ms in values] for name, values in milliseconds.items()}
    sent = dict.fromkeys(times, 2.5e6)
    return OnLink(rate, 95e6, 0.0004, 0.0002, 0.1, 1000, times, sent)


MEASURED = Measured(
    Settings(links=(1e8, None), rounds=3),
    [
        on_link(
            1e8,
            **{
                "compute only": [10, 20, 10],
                "synchronous": [100, 200, 100],
                "synchronous, fp16": [50, 100, 50],
                "local SGD, period 4": [30, 60, 30],
            },
        ),
        on_link(
            None,
            **{
                "compute only": [10, 20, 10],
                "synchronous": [15, 30, 15],
                "synchronous, fp16": [30, 60, 30],
                "local SGD, period 4": [9, 60, 30],
            },
        ),
    ],
)


@pytest.mark.parametrize(
    ("text", "rate", "name"),
    [
        ("100Mbit", 1e8, "100 Mbit/s"),
        ("2.5 Gbit/s", 2.5e9, "2.5 Gbit/s"),
        ("1G", 1e9, "1 Gbit/s"),
        ("400gbit", None, None),
        ("0Mbit", None, None),
        ("fast", None, None),
        ("800", 800, "800 bit/s"),
    ],
)
def test_rates_are_read_and_written_as_people_do(text, rate, name):
    if rate is None:
        with pytest.raises(ValueError, match="expected a rate such as 100Mbit or 25Gbit"):
            rates.parse(text)
    else:
        assert rates.parse(text) == rate and rates.name(rate) == name


def test_the_loopback_has_no_rate():
    assert rates.parse("loopback") is None and rates.name(None) == "loopback"


def test_a_link_carries_what_was_asked_for_less_its_headers():
    assert is_as_asked(1e8, 9.5e7) and is_as_asked(None, 1e6)
    # A burst that lets whole messages through, and a machine that is busy with something else.
    assert not is_as_asked(1e8, 1.3e8) and not is_as_asked(1e9, 6.8e8)


def test_each_link_has_a_table_with_what_loses_in_it():
    output = io.StringIO()
    show(MEASURED.report(), Console(file=output, width=200))
    text = output.getvalue()
    rows = [[c.strip() for c in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]
    sync = ["synchronous", "100.0", "2.50", "10.00 (10.00-10.00)", "1.00 (1.00-1.00)"]
    assert rows[:2] == [["compute only", "10.0", "2.50", "1.00 (1.00-1.00)", ""], sync]
    assert rows[6:] == [
        ["synchronous, fp16", "30.0", "2.50", "3.00 (3.00-3.00)", "2.00 (2.00-2.00)"],
        ["local SGD, period 4", "30.0", "2.50", "noise (0.90-3.00)", "noise (0.60-2.00)"],
    ]
    assert "A bare all-reduce sends 95 Mbit/s from each rank, an empty one after" in text
    assert "computing takes 0.4 ms, and 0.2 ms right behind another." in text


def test_the_plot_leaves_out_what_noise_hides():
    (chart,) = MEASURED.report().charts
    assert chart.series["loopback"] == [1.0, 1.5, 3.0, None]


def test_numbers_are_kept_and_settings_survive_json(tmp_path: Path):
    write(MEASURED.report(), tmp_path)
    kept = json.loads((tmp_path / "link.json").read_text())
    assert kept["links"][0]["seconds_per_step"]["synchronous"] == [0.1, 0.2, 0.1]
    assert Settings.from_dict(kept["settings"]) == MEASURED.settings
    assert Settings.from_dict(json.loads(json.dumps(asdict(Settings())))) == Settings()


def test_without_root_it_says_so_in_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "link"])
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "Error: two hosts cannot be made on this machine: only root may make network namespaces; "
        "run it as root"
    )


def test_a_rate_that_is_none_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "link", "--link", "quick"])
    assert end.value.code == 2
    assert "expected a rate such as 100Mbit" in " ".join(capsys.readouterr().err.split())
