"""``python -m hvdsync bench step``, as a user starts it on two workers."""

from __future__ import annotations

import json

import pytest
from train_runs import succeed

COMMON = ["compute only", "hvdsync", "raw Horovod"]
OTHERS = {
    "torch": ["hvdsync, communication only", *(f"DDP, {n} MB buckets" for n in (1, 4, 25))],
    "tensorflow": [
        "MultiWorkerMirroredStrategy",
        *(f"{name}, in fit" for name in COMMON),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("framework", OTHERS)
def test_all_contenders_step_in_turns(tmp_path, framework):
    brief = ("--models", "linear,cnn", "--rounds", "2", "--seconds", "0.01", "--out", "results")
    bench = ("python", "-m", "hvdsync", "bench", "step", "--framework", framework, *brief)
    succeed(["horovodrun", "--gloo", "-np", "2", *bench], tmp_path)
    kept = json.loads((tmp_path / "results" / "step.json").read_text())
    assert kept["environment"]["ranks"] == 2
    for model in ("linear", "cnn"):
        times = kept["seconds of a step"][model]
        assert sorted(times) == sorted(COMMON + OTHERS[framework])
        assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in times.values())
    if framework == "torch":
        weights, flags = 784 * 10 + 10, 2 * 2 + 2
        sent = kept["bytes and collectives of a step"]["linear"]["hvdsync"]
        assert sent == [4 * (weights + flags), 1]
    assert (tmp_path / "results" / "step.html").exists()
