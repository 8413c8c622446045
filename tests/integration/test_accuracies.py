"""Four ranks over MPI learn MNIST with update rules and compression: docs say how well.

A small network, and the recipes of docs/update-rules.md and docs/compression.md.
"""

from __future__ import annotations

import shutil

import pytest
from train_runs import TRAIN, environment, events, succeed

RECIPE = ("--model", "mlp", "--device", "cpu")
CASES = [
    ("torch", "--update", "diloco"),
    ("torch", "--compression", "powersgd:4"),
    ("tensorflow", "--update", "async"),
    ("keras", "--compression", "bf16"),
]


# What four epochs came to without compression, in percent, and what may be lost of it.
UNCOMPRESSED, LOST = 96.49, 0.5
PLAIN = ("--epochs", "4", "--optimizer", "sgd", "--lr", "0.1")


def end_of_training(framework, options, folder):
    if shutil.which("mpirun", path=environment()["PATH"]) is None:
        pytest.skip("there is no mpirun")
    own = ("--framework", framework, "--checkpoint-dir", "run", "--log-dir", "log")
    succeed(["horovodrun", "--mpi", "-np", "4", *TRAIN, *RECIPE, *own, *options], folder)
    (end,) = (event for event in events(folder / "log") if event["event"] == "end")
    return end


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_four_ranks_over_mpi_learn(case, tmp_path):
    framework, *options = case
    end = end_of_training(framework, ("--epochs", "1", *options), tmp_path)
    assert end["step"] == 235
    assert end["test_accuracy"] > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(
    "compression",
    [
        "onebit",
        pytest.param("topk:0.01", marks=pytest.mark.matrix),
        pytest.param("powersgd:4", marks=pytest.mark.matrix),
    ],
)
def test_error_feedback_keeps_the_accuracy_of_plain_gradients(compression, tmp_path):
    end = end_of_training("torch", (*PLAIN, "--compression", compression), tmp_path)
    assert 100 * end["test_accuracy"] > UNCOMPRESSED - LOST
