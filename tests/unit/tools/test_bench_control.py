"""The growth of times with the number of ranks, and what ``bench control`` tells of it."""

from __future__ import annotations

import math

import pytest
from click.testing import CliRunner

from hvdsync.tools.bench import command, environment
from hvdsync.tools.bench.control import Settings, make_report
from hvdsync.tools.bench.growth import fit

RANKS = (2, 4, 8, 16)


@pytest.mark.parametrize(
    ("law", "base", "slope", "value"),
    [
        ("constant", 3.0, 0.0, lambda n: 0),
        ("logarithmic", 1.0, 2.0, math.log2),
        ("linear", 1.0, 0.5, lambda n: n),
        ("quadratic", 2.0, 0.1, lambda n: n * n),
    ],
)
def test_each_law_is_found_with_its_numbers_in_noisy_times(law, base, slope, value):
    noise = (1.01, 0.99, 1.005, 0.995)
    growth = fit(RANKS, [(base + slope * value(n)) * e for n, e in zip(RANKS, noise, strict=True)])
    assert growth.law == law
    assert growth.base == pytest.approx(base, rel=0.2)
    assert growth.slope == pytest.approx(slope, rel=0.2)
    assert growth.at(1000) == pytest.approx(base + slope * value(1000), rel=0.2)
    assert growth.error < 0.02


def test_times_that_shrink_with_ranks_do_not_grow():
    assert fit(RANKS, [1.0, 0.9, 0.8, 0.7]).law == "constant"


def test_no_law_begins_below_nothing():
    growth = fit(RANKS, [n - 1.9 for n in RANKS])
    assert growth.base >= 0


def test_the_report_has_a_row_for_each_with_its_growth(monkeypatch):
    monkeypatch.setattr(environment, "cores", lambda: 2)
    measured = {n: {"start": 1.0 * n, "agree": 0.001} for n in RANKS}
    made = make_report(Settings(RANKS), measured)
    (table,) = made.tables
    start, agree = table.rows
    assert start[:5] == ["start", "2,000", "4,000", "8,000", "16,000"]
    assert start[5].startswith("linear")
    assert start[6].startswith("constant")  # the same work on each core
    assert agree[5].startswith("constant")
    assert made.numbers["seconds"]["16"] == {"start": 16.0, "agree": 0.001}
    assert made.charts[0].x == list(RANKS)


@pytest.mark.parametrize("ranks", ["two", "0,2", ""])
def test_what_is_no_number_of_ranks_is_refused(ranks):
    result = CliRunner().invoke(command, ["control", "--ranks", ranks])
    assert result.exit_code == 2
    assert "expected whole numbers" in " ".join(result.output.split())


def test_under_a_launcher_it_says_that_it_launches_ranks_itself(monkeypatch):
    monkeypatch.setenv("HOROVOD_RANK", "1")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    result = CliRunner().invoke(command, ["control"])
    assert "launches its workers itself, found rank 1 of horovodrun" in str(result.exception)
