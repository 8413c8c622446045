"""The smaller benchmarks below ``python -m hvdsync bench``, as a user starts them."""

from __future__ import annotations

import json

import pytest
from train_runs import launcher, succeed

BENCH = ("python", "-m", "hvdsync", "bench")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "name", "brief", "told"),
    [
        (launcher(2), "allreduce", ("--largest", "0.004", "--rounds", "2"), "Bus bandwidth, GB/s"),
        (launcher(2), "guard", ("--every", "5", "--rounds", "2"), "and times split"),
        pytest.param(
            launcher(2),
            "checkpoint",
            ("--model", "linear", "--every", "2", "--rounds", "2"),
            "restored on all ranks",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            (),
            "scaling",
            ("--model", "linear", "--workers", "1,2", "--rounds", "1"),
            "Scaling",
            marks=pytest.mark.matrix,
        ),
        ((), "startup", ("--rounds", "1"), "x raw Horovod"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_benchmark_tells_and_keeps_what_it_measured(start, name, brief, told, tmp_path):
    output = succeed([*start, *BENCH, name, *brief, "--out", "kept"], tmp_path)
    assert output.count(told) == 1
    kept = tmp_path / "kept"
    assert {p.suffix for p in kept.iterdir()} == {".json", ".svg", ".html"}
    numbers = json.loads((kept / f"{name}.json").read_text())
    assert {"cores", "ranks", "threads per rank", "Python"} <= set(numbers["environment"])
    assert numbers["seconds"]
