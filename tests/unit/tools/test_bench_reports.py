"""What the smaller benchmarks tell of what was measured, and where they refuse to start."""

from __future__ import annotations

import pytest

from hvdsync.tools import cli
from hvdsync.tools.bench import allreduce, checkpoint, guard, scaling, startup
from hvdsync.tools.bench.compared import Compared
from hvdsync.tools.bench.ratios import paired


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # 1 GB in 1 s: two ranks pass on 2 * 1/2 of it, four 2 * 3/4.
    assert allreduce.bus_bandwidth(10**9, 1.0, 2) == 1e9
    assert allreduce.bus_bandwidth(10**9, 1.0, 4) == 1.5e9
    assert allreduce.SIZES[0] == 1024 and allreduce.SIZES[-1] == 64 * 1024**2


def test_libraries_are_compared_at_each_size() -> None:
    seconds = {
        1024: {"Horovod over MPI": [0.002] * 6, "mpi4py": [0.0005] * 6},
        2**20: {"Horovod over MPI": [0.01] * 6, "mpi4py": [0.01, 0.02, 0.03, 0.01, 0.02, 0.03]},
    }
    report = allreduce.make_report(seconds, "Horovod over MPI", ranks=2)
    times, bandwidths, ratios = report.tables
    assert list(times.rows) == [["1 KB", "2", "0.5"], ["1 MB", "10", "20"]]
    assert bandwidths.rows[1] == ["1 MB", "0.105", "0.0524"]
    assert list(ratios.rows) == [["1 KB", "0.25 (0.25-0.25)"], ["1 MB", "noise (1.00-3.00)"]]
    assert report.environment["cores"] >= 1


def test_all_are_compared_with_one() -> None:
    compared = Compared({"without": [1.0] * 6, "with": [1.1] * 6, "noisy": [1, 9] * 3}, "without")
    assert list(compared.table("", per=100).rows) == [
        ("without", "10", "1"),
        ("with", "11", "1.10 (1.10-1.10)"),
        ("noisy", "50", "noise (1.00-9.00)"),
    ]
    chart = compared.chart("")
    assert chart.series["over without"] == [1.0, pytest.approx(1.1), None]
    assert compared.numbers()["ratios"]["noisy"]["median"] is None


def test_one_pair_says_nothing_of_its_spread() -> None:
    assert str(paired([3.0], [2.0])) == "noise (1.50-1.50)"


def test_efficiency_is_the_ideal_time_over_the_real_one() -> None:
    taken = {
        1: {"weak": [0.010] * 6, "strong": [0.010] * 6},
        2: {"weak": [0.0125] * 6, "strong": [0.00625] * 6},
    }
    report = scaling.make_report(scaling.Settings(sizes=(1, 2)), taken)
    (table,) = report.tables
    assert list(table.rows) == [
        ["1", "10", "1", "10", "1"],
        ["2", "12.5", "0.80 (0.80-0.80)", "6.25", "0.80 (0.80-0.80)"],
    ]


def test_the_way_to_the_first_step_is_told_in_parts() -> None:
    parts = dict(zip(startup.PARTS, (1.0, 2.0, 0.5, 0.5), strict=True))
    taken = {"hvdsync": [parts] * 6, "raw Horovod": [{**parts, "launch": 5.0}] * 6}
    report = startup.make_report(startup.Settings(), taken, trained=[6.0] * 6)
    (table,) = report.tables
    assert list(table.rows) == [
        ["hvdsync", "1.00", "2.00", "0.50", "0.50", "4.00", "0.50 (0.50-0.50)"],
        ["raw Horovod", "5.00", "2.00", "0.50", "0.50", "8.00", "1"],
        ["hvdsync.train", "", "", "", "", "6.00", "0.75 (0.75-0.75)"],
    ]


def test_a_save_costs_what_steps_with_it_take_longer() -> None:
    seconds = {
        "no checkpoint": [1.0] * 6,
        "torch.save on rank 0": [1.3] * 6,
        "saved at once": [1.5] * 6,
        "saved in the background": [1.1, 1.0, 1.2, 1.1, 1.1, 1.1],
    }
    compared = Compared(seconds, "no checkpoint")
    report = checkpoint.make_report(checkpoint.Settings(), compared, [0.2], 80_000_000, 2)
    assert "a checkpoint is 80 MB" in report.about[0]
    assert list(report.tables[1].rows) == [
        ("torch.save on rank 0", "300", "300 to 300"),
        ("saved at once", "500", "500 to 500"),
        ("saved in the background", "100", "0 to 200"),
        ("restored on all ranks", "200", "200 to 200"),
    ]


def test_steps_with_a_guard_are_told_one_by_one() -> None:
    compared = Compared({"no guard": [1.0] * 6, "gradients judged": [1.02] * 6}, "no guard")
    report = guard.make_report(guard.Settings(every=100), compared, ranks=2)
    assert report.tables[0].rows[1] == ("gradients judged", "10.2", "1.02 (1.02-1.02)")


@pytest.mark.parametrize("name", ["allreduce", "updates"])
def test_what_compares_workers_says_how_to_start_several(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", name])
    assert end.value.code == 1
    assert f"-np 2 python -m hvdsync bench {name}`" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["scaling", "startup"])
def test_what_launches_its_workers_itself_is_not_launched(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"):
        monkeypatch.setenv(f"HOROVOD_{variable}", "1" if "SIZE" in variable else "0")
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", name])
    assert end.value.code == 1
    assert f"start it with `python -m hvdsync bench {name}`" in capsys.readouterr().err
