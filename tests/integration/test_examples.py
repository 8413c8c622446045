"""The examples, as a newcomer starts them on two workers."""

from __future__ import annotations

import re
import shutil

import pytest
from train_runs import ROOT, environment, launcher, newest, run, succeed

# Enough to see it learn, at the options that each example has.
BRIEF = {
    "pytorch": ("--epochs", "1", "--steps", "150"),
    "tensorflow": ("--steps", "300"),
    "keras": ("--epochs", "1", "--steps", "150"),
}


@pytest.mark.parametrize("name", BRIEF)
def test_an_example_learns_on_two_workers_and_rank_zero_tells(name, tmp_path):
    script = ROOT / "examples" / f"{name}_mnist.py"
    output = succeed([*launcher(2), "python", script, *BRIEF[name]], tmp_path)
    told = re.findall(r"^\[(\d)\]<stdout>:test accuracy ([\d.]+)%", output, re.M)
    ((rank, accuracy),) = told
    assert rank == "0"
    assert float(accuracy) > 85
    assert "[1]<stdout>:" not in output
    (written,) = tmp_path.iterdir()
    folder = written / f"{name}-mnist"
    if name == "pytorch":
        import torch

        state = torch.load(newest(folder) / "model.pt", weights_only=True)
        assert state["0.weight"].shape == (128, 784)
    elif name == "keras":
        assert (newest(folder) / "model.keras").is_file()
    else:
        assert (folder / "model-1.index").is_file()


def test_an_example_runs_without_a_launcher(tmp_path):
    script = ROOT / "examples" / "pytorch_mnist.py"
    result = run(["python", script, "--epochs", "1", "--steps", "20"], tmp_path)
    assert result.returncode == 0, result.stderr
    assert "test accuracy" in result.stdout


def test_distributed_data_parallel_by_hand_and_through_distribute_is_the_same(tmp_path):
    import torch

    script = ROOT / "examples" / "pytorch_ddp_mnist.py"
    learned = []
    for way in ((), ("--by-hand",)):
        output = succeed(["python", script, "--epochs", "1", "--steps", "150", *way], tmp_path)
        assert float(re.search(r"^test accuracy ([\d.]+)%", output, re.M)[1]) > 80
        assert "process 1: loss" in output
        learned.append(torch.load(tmp_path / "pytorch-ddp-mnist.pt", weights_only=True))
    assert learned[0].keys() == {"weight", "bias"}
    for name, tensor in learned[0].items():
        assert torch.equal(tensor, learned[1][name])


def test_workers_that_do_not_wait_end_with_one_model_that_has_learned(tmp_path):
    if shutil.which("mpirun", path=environment()["PATH"]) is None:
        pytest.skip("there is no mpirun")
    script = ROOT / "examples" / "pytorch_async_mnist.py"
    brief = ("--epochs", "1", "--steps", "150", "--staleness", "20")
    output = succeed(["horovodrun", "--mpi", "-np", "2", "python", script, *brief], tmp_path)
    told = re.findall(r"^\[1,(\d)\]<stdout>: ?test accuracy ([\d.]+)%", output, re.M)
    ((rank, accuracy),) = told
    assert rank == "0"
    assert float(accuracy) > 80


@pytest.mark.parametrize("name", [*BRIEF, "pytorch_ddp", "pytorch_async"])
def test_an_example_is_short(name):
    lines = (ROOT / "examples" / f"{name}_mnist.py").read_text().splitlines()
    assert len(lines) <= 60
