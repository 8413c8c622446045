"""Four ranks over MPI learn MNIST with update rules and compression: docs say how well.

One epoch of a small network; the same recipe stands in docs/update-rules.md.
"""

from __future__ import annotations

import shutil

import pytest
from train_runs import TRAIN, environment, events, succeed

RECIPE = ("--model", "mlp", "--epochs", "1", "--device", "cpu")
CASES = [
    ("torch", "--update", "diloco"),
    ("torch", "--compression", "powersgd:4"),
    ("tensorflow", "--update", "async"),
    ("keras", "--compression", "bf16"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_four_ranks_over_mpi_learn(case, tmp_path):
    if shutil.which("mpirun", path=environment()["PATH"]) is None:
        pytest.skip("there is no mpirun")
    framework, *options = case
    own = ("--framework", framework, "--checkpoint-dir", "run", "--log-dir", "log")
    succeed(["horovodrun", "--mpi", "-np", "4", *TRAIN, *RECIPE, *own, *options], tmp_path)
    (end,) = (event for event in events(tmp_path / "log") if event["event"] == "end")
    assert end["step"] == 235
    assert end["test_accuracy"] > 0.95
