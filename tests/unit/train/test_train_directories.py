"""Each run has a folder of its own; checkpoints of two runs are never mixed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hvdsync.checkpoint.store import Store
from hvdsync.errors import HvdsyncError
from hvdsync.train.config import TrainConfig
from hvdsync.train.directories import choose_directory


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_checkpoint(directory: Path, step: int = 3) -> None:
    store = Store(directory, 1)
    store.write(step, lambda folder: None, {})
    store.close()


def test_runs_of_one_kind_are_numbered() -> None:
    config = TrainConfig()
    assert choose_directory(config) == Path("runs/mnist-cnn-torch/1")
    assert choose_directory(config) == Path("runs/mnist-cnn-torch/2")
    other = replace(config, framework="keras", model="mlp", dataset="some/own.npz")
    assert choose_directory(other) == Path("runs/own-mlp-keras/1")


def test_resume_takes_the_newest_run_with_a_checkpoint() -> None:
    for _ in range(11):
        choose_directory(TrainConfig())
    for number in (2, 10):
        write_checkpoint(Path(f"runs/mnist-cnn-torch/{number}"))
    assert choose_directory(TrainConfig(resume=True)) == Path("runs/mnist-cnn-torch/10")


def test_resume_without_any_checkpoint_starts_a_run() -> None:
    assert choose_directory(TrainConfig(resume=True)) == Path("runs/mnist-cnn-torch/1")


def test_a_named_folder_with_checkpoints_is_taken_up_unless_told_not_to(here: Path) -> None:
    config = TrainConfig(checkpoint_dir=here / "mine")
    new = replace(config, resume=False)
    assert choose_directory(new) == here / "mine"
    write_checkpoint(here / "mine", step=7)
    with pytest.raises(
        HvdsyncError, match=r"--no-resume: .*mine holds the checkpoint of step 7 .*another --check"
    ):
        choose_directory(new)
    assert choose_directory(config) == here / "mine"
    assert choose_directory(replace(config, resume=True)) == here / "mine"


def test_a_folder_that_cannot_be_made_is_an_error_with_its_name(here: Path) -> None:
    (here / "runs").write_text("in the way")
    with pytest.raises(HvdsyncError, match="runs"):
        choose_directory(TrainConfig())
