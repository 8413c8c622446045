"""The two engines of PyTorch: the same weights from the same seed, under every launcher."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from train_runs import TRAIN, environment, launcher, newest, run, succeed, weights

pytestmark = pytest.mark.slow

OPTIONS = (
    *("--dataset", "synthetic", "--model", "mlp", "--optimizer", "momentum", "--lr", "0.02"),
    *("--device", "cpu", "--dropout", "0.2", "--accumulate", "3", "--checkpoint-dir", "run"),
)
MODULE = TRAIN[1:]
LAUNCHERS = {
    "horovodrun": (*launcher(2), *TRAIN),
    "mpirun": ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2", *TRAIN),
    "torchrun": ("torchrun", "--nproc-per-node", "2", *MODULE),
}
RANK = Path(__file__).with_name("ddp_rank.py")


def train(folder, command, *options):
    folder.mkdir(exist_ok=True)
    succeed([*command, *OPTIONS, *options], folder)
    return weights(newest(folder / "run"))


def assert_same(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def over_horovod(tmp_path_factory):
    """The weights of two epochs on two ranks."""
    folder = tmp_path_factory.mktemp("horovod")
    return train(folder, LAUNCHERS["horovodrun"], "--epochs", "2")


@pytest.mark.parametrize("name", LAUNCHERS)
def test_both_engines_train_the_same_weights(name, over_horovod, tmp_path):
    if shutil.which(name, path=environment()["PATH"]) is None:
        pytest.skip(f"there is no {name}")
    found = train(tmp_path, LAUNCHERS[name], "--epochs", "2", "--engine", "ddp")
    assert_same(found, over_horovod)


def test_a_run_goes_on_with_the_other_engine(over_horovod, tmp_path):
    """Rates depend on the number of epochs only in the warm-up, which is in the first."""
    start = LAUNCHERS["horovodrun"]
    train(tmp_path, start, "--epochs", "1", "--engine", "ddp")
    assert_same(train(tmp_path, start, "--epochs", "2"), over_horovod)


def test_an_engine_that_a_framework_lacks_is_refused_in_one_sentence(tmp_path):
    result = run([*TRAIN, "--engine", "ddp", "--framework", "keras"], tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("Error: --engine ddp: DistributedDataParallel is PyTorch's own")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("raise", "RankFailed: rank 0 of 2 cannot go on: a rank that it talks to has ended"),
        ("late", "StalledRank: rank 0 of 2: a rank did not come to a collective operation"),
    ],
)
def test_a_rank_that_does_not_come_is_an_error_on_the_other(reason, told, tmp_path):
    result = run([*launcher(2), "python", RANK, reason], tmp_path)
    assert result.returncode == 1
    assert told in result.stdout
    assert ("ValueError: its own mistake" in result.stderr) == (reason == "raise")
