"""What ``bench step`` makes of times: pairs, ratios, what travelled, and what was hidden."""

from __future__ import annotations

import pytest

from hvdsync.tools import cli
from hvdsync.tools.bench.contenders import COMMUNICATION, COMPUTE, HVDSYNC, RAW
from hvdsync.tools.bench.step import Measured, Settings, make_report

ROUNDS = 8
MEASURED = Measured(
    "mlp",
    {
        COMPUTE: [0.010] * ROUNDS,
        HVDSYNC: [0.012] * ROUNDS,
        COMMUNICATION: [0.004] * ROUNDS,
        RAW: [0.018] * ROUNDS,
        f"{COMPUTE}, in fit": [0.020] * ROUNDS,
        f"{HVDSYNC}, in fit": [0.025, 0.05] * (ROUNDS // 2),
    },
    {HVDSYNC: (4e6, 2)},
)


def tables() -> dict[str, list[dict[str, str]]]:
    report = make_report(Settings(), [MEASURED], ranks=2)
    return {
        t.title: [dict(zip(t.columns, row, strict=True)) for row in t.rows] for t in report.tables
    }


def test_times_are_medians_and_ratios_are_to_the_hvdsync_that_does_the_same() -> None:
    found = tables()
    (times,) = found["Milliseconds of a step"]
    assert (times[COMPUTE], times[HVDSYNC], times[RAW], times["noise"]) == (
        "10.00",
        "12.00",
        "18.00",
        "0%",
    )
    assert COMMUNICATION not in times
    (ratios,) = found["Time over that of hvdsync (above 1: hvdsync is faster)"]
    assert ratios[RAW] == "1.50 (1.50-1.50)"
    assert ratios[COMPUTE] == "0.83 (0.83-0.83)"
    # 20 over 25 and over 50 milliseconds: that says nothing.
    assert ratios[f"{COMPUTE}, in fit"] == "noise (0.40-0.80)"


def test_traffic_has_the_bandwidth_of_a_ring_and_the_share_that_was_hidden() -> None:
    (row,) = tables()["What hvdsync puts on the wire"]
    # 4 MB in 4 ms, of which two ranks pass on 2 (2 - 1) / 2 = 1 time as much: 1 GB/s. The step is
    # 2 ms longer than one that only computes, so that half of the 4 ms was hidden.
    assert list(row.values()) == ["mlp", "4.00", "2", "4.00", "1.00", "50%"]


def test_a_model_that_does_not_exist_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "step", "--models", "mlp,huge"])
    assert end.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "there is no model huge; there are linear, mlp" in said
