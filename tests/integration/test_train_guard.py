"""A bad image in the data of ``python -m hvdsync.train``: one message, or a step left out."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from train_runs import TRAIN, launcher, newest, run, weights

FRAMEWORKS = [
    "torch",
    pytest.param("tensorflow", marks=pytest.mark.slow),
    pytest.param("keras", marks=pytest.mark.slow),
]
OPTIONS = ("--model", "linear", "--epochs", "1", "--batch-size", "16", "--device", "cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """128 images, one of which has three pixels that are no number."""
    rng = np.random.default_rng(0)
    images = rng.random((128, 6, 6, 1), dtype=np.float32)
    labels = rng.integers(0, 3, 128)
    bad = images.copy()
    bad[77, 0, :3] = np.nan
    path = tmp_path_factory.mktemp("data") / "bad.npz"
    np.savez(path, x_train=bad, y_train=labels, x_test=images[:32], y_test=labels[:32])
    return path


def train(data: Path, framework: str, folder: Path, *options: str):
    command = [*launcher(2), *TRAIN, *OPTIONS, "--framework", framework, "--dataset", data]
    return run([*command, *options, "--checkpoint-dir", "run"], folder)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_bad_image_ends_the_run_with_one_message_that_says_so(data, framework, tmp_path):
    result = train(data, framework, tmp_path)
    output = result.stdout + result.stderr
    assert result.returncode == 1, output
    # Once by a rank; the launcher repeats last words.
    assert len(re.findall(r"^\[\d\]<.*gradients are not finite", output, re.M)) == 1, output
    assert "its input was bad already (3 NaN elements)" in output
    assert "Traceback" not in output.split("gradients are not finite")[0]
    assert not list((tmp_path / "run").glob("step-*"))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_its_step_is_left_out_on_request(data, framework, tmp_path):
    result = train(data, framework, tmp_path, "--on-nonfinite", "skip")
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert output.count("the step is left out on all ranks, 1 so far") == 1, output
    assert all(np.isfinite(w).all() for w in weights(newest(tmp_path / "run")))
