"""``python -m hvdsync bench``, as a user starts it on two workers."""

from __future__ import annotations

import json
import shutil

import pytest
from train_runs import environment, succeed


@pytest.mark.slow
def test_update_rules_are_raced_with_one_slow_worker(tmp_path):
    if shutil.which("mpirun", path=environment()["PATH"]) is None:
        pytest.skip("there is no mpirun")
    brief = ("--dataset", "synthetic", "--rounds", "1", "--seconds", "1", "--samples", "128")
    more = ("--batch-size", "16", "--slow", "20", "--period", "4", "--staleness", "3")
    bench = ("python", "-m", "hvdsync", "bench", "updates", *brief, *more, "--out", ".")
    output = succeed(["horovodrun", "--mpi", "-np", "2", *bench], tmp_path)
    assert output.count("asynchronous, staleness 3") == 1
    kept = json.loads((tmp_path / "updates.json").read_text())
    timed = {name: run["steps"] for name, (run,) in kept["of_equal_time"].items()}
    rules = ["synchronous", "local SGD, period 4", "asynchronous", "asynchronous, staleness 3"]
    assert list(timed) == rules
    for name in rules[:2]:
        assert timed[name][0] == timed[name][1]
    # Twenty times as long a step is not hidden by any noise.
    slow, quick = timed["asynchronous"]
    assert quick > 3 * slow
    for (run,) in kept["of_equal_samples"].values():
        assert run["steps"] == [4, 4]
        assert run["seconds"] > 0 and 0 <= run["accuracy"] <= 1
