"""``python -m hvdsync.train`` as a user starts it: each framework and launcher, and resuming."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from train_runs import TRAIN, environment, launcher, newest, run, succeed, weights

COMPARING = ("python", Path(__file__).with_name("train_and_compare.py"))
FRAMEWORKS = ["torch", "tensorflow", "keras"]
SYNTHETIC = ("--dataset", "synthetic", "--optimizer", "momentum", "--lr", "0.02", "--device", "cpu")
LINEAR = (*SYNTHETIC, "--model", "linear", "--scale-lr", "none", "--epochs", "1")


@dataclass
class Run:
    """A finished run of two epochs on two ranks."""

    folder: Path
    output: str

    @property
    def checkpoint(self) -> Path:
        return newest(self.folder / "run")

    @property
    def events(self) -> list[dict]:
        lines = (self.folder / "logs" / "events.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Gives the run of a framework; it is made once."""
    runs: dict[str, Run] = {}

    def of(framework):
        if framework not in runs:
            folder = tmp_path_factory.mktemp(framework)
            output = succeed(
                [
                    *launcher(2),
                    *COMPARING,
                    *options(framework, epochs=2),
                    "--log-dir",
                    "logs",
                ],
                folder,
            )
            runs[framework] = Run(folder, output)
        return runs[framework]

    return of


def options(framework, epochs):
    arguments = ("--framework", framework, "--epochs", str(epochs), "--checkpoint-dir", "run")
    return (*SYNTHETIC, *arguments)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_ranks_learn_and_hold_the_same_weights(finished, framework):
    output = finished(framework).output
    accuracy = float(re.search(r"test accuracy\s+│\s+([\d.]+)%", output)[1])
    assert accuracy > 99
    assert "2 ranks hold 1 different model(s)" in output


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_only_rank_zero_speaks_and_writes(finished, framework):
    run = finished(framework)
    assert "[0]<stdout>:" in run.output
    assert "[1]<stdout>:" not in run.output
    assert sorted(p.name for p in run.folder.iterdir()) == ["logs", "run"]
    steps = sorted(p.name for p in (run.folder / "run").iterdir() if p.name != ".lock")
    assert steps == ["step-00000064", "step-00000128"]
    assert len(list((run.folder / "logs").glob("events.out.tfevents.*"))) == 1


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_log_tells_the_run_line_by_line(finished, framework):
    run = finished(framework)
    events = run.events
    several = ("step", "seconds", "straggler")
    once = [e["event"] for e in events if e["event"] not in several]
    assert once == ["run", "epoch", "epoch", "end"]
    start, end = events[0], events[-1]
    assert (start["workers"], start["config"]["framework"]) == (2, framework)
    assert end["checkpoint"] == "run/step-00000128"
    assert end["test_accuracy"] > 0.99
    assert end["images_per_second"] > 0
    assert 0 < end["communication"] < 1
    # Twice the rate of one worker, by its square root, once the warm-up is over.
    last = [e for e in events if e["event"] == "step"][-1]
    assert last["learning_rate"] == pytest.approx(0.02 * 2**0.5)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_log_tells_where_each_steps_time_went_on_each_rank(finished, framework):
    events = finished(framework).events
    splits = [e for e in events if e["event"] == "seconds"]
    # Compiling makes the first step one of its own.
    assert [e["step"] for e in splits] == list(range(2, 129))
    kinds = ("data", "compute", "waiting", "communication", "checkpoint")
    for split in splits:
        assert all(len(split[kind]) == 2 for kind in kinds)
        assert min(split["waiting"]) == 0 <= min(split["compute"])
        assert split["communication"][0] == split["communication"][1]
    assert sum(sum(split["communication"]) for split in splits) > 0
    assert sum(sum(split["compute"]) for split in splits) > 0
    reports = [e for e in events if e["event"] == "straggler"]
    assert [(e["first_step"], e["step"]) for e in reports] == [(2, 101), (102, 128)]
    assert all(f"rank {e['rank']} is the slowest" in e["text"] for e in reports)


@pytest.mark.parametrize("framework", ["tensorflow", "keras"])
def test_frameworks_take_the_same_steps(finished, framework):
    ours, theirs = (finished(f) for f in (framework, "torch"))
    # Twenty steps in, rounding has not grown yet: same weights, samples, rates and sums.
    mine, other = (next(e for e in run.events if e["event"] == "step") for run in (ours, theirs))
    assert mine["step"] == other["step"] == 20
    assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert mine["learning_rate"] == other["learning_rate"]
    # By the end it has, at single weights, where the largest of four pixels changes; kernels are of
    # size 0.3.
    pairs = zip(weights(ours.checkpoint), weights(theirs.checkpoint), strict=True)
    apart = np.concatenate([np.abs(a - b).ravel() for a, b in pairs])
    assert np.quantile(apart, 0.999) < 0.02


def test_a_second_run_in_the_same_folder_goes_on_unless_it_is_told_not_to(finished, tmp_path):
    shutil.copytree(finished("torch").folder / "run", tmp_path / "run")
    result = run([*TRAIN, *options("torch", epochs=2), "--no-resume"], tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("--no-resume: run holds the checkpoint of step 128") == 1
    assert "Traceback" not in result.stderr
    output = succeed([*TRAIN, *options("torch", epochs=2)], tmp_path)
    assert "going on after epoch 2, step 128, of run" in output
    assert "nothing is left to train" in output


def test_ranks_together_compute_what_one_process_does(tmp_path):
    (tmp_path / "one.yaml").write_text("batch-size: 7\nepochs: 9\nlog-dir: logs\n")
    given = ("--config", "one.yaml", *LINEAR, "--batch-size", "64", "--checkpoint-dir", "one")
    output = succeed([*TRAIN, *given], tmp_path)
    assert "1 worker(s), 64 samples each" in output
    start = json.loads((tmp_path / "logs" / "events.jsonl").read_text().splitlines()[0])
    assert (start["config"]["epochs"], start["config"]["batch_size"]) == (1, 64)

    # Two ranks with half the batch read the same samples at each step.
    shared = (*LINEAR, "--batch-size", "32", "--checkpoint-dir", "two")
    succeed([*launcher(2), *TRAIN, *shared], tmp_path)
    # Passes of 16 samples on each rank, two per step: the same samples once more.
    accumulated = (*LINEAR, "--batch-size", "16", "--accumulate", "2", "--checkpoint-dir", "acc")
    succeed([*launcher(2), *TRAIN, *accumulated], tmp_path)
    one, two, acc = (weights(newest(tmp_path / name)) for name in ("one", "two", "acc"))
    for alone, together, in_passes in zip(one, two, acc, strict=True):
        np.testing.assert_allclose(together, alone, atol=1e-5)
        np.testing.assert_allclose(in_passes, alone, atol=1e-5)


def test_mpirun_starts_it_too(tmp_path):
    if shutil.which("mpirun", path=environment()["PATH"]) is None:
        pytest.skip("there is no mpirun")
    start = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2")
    output = succeed([*start, *TRAIN, *LINEAR], tmp_path)
    assert "2 worker(s)" in output
    assert "\x1b" not in output  # nobody sees the pseudo-terminal that mpirun makes
    # Without a named folder the run gets one of its own.
    assert newest(tmp_path / "runs" / "synthetic-linear-torch" / "1").name == "step-00000064"


def test_a_wrong_option_is_one_sentence_from_all_ranks(tmp_path):
    result = run([*launcher(2), *TRAIN, "--epochs", "many"], tmp_path)
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if "<stderr>:Error" in line]
    assert said == [
        "[0]<stderr>:Error: Invalid value for '--epochs': 'many' is not a valid whole number."
    ]
    assert "[1]<stderr>:Error" not in result.stdout + result.stderr


def test_gpus_that_are_not_there_are_missed_in_one_sentence(tmp_path):
    if shutil.which("nvidia-smi") is not None and _gpus() > 1:
        pytest.skip("there are enough GPUs")
    command = [*launcher(2), *TRAIN, "--dataset", "synthetic", "--device", "cuda"]
    result = run(command, tmp_path)
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if "Error: --device cuda" in line]
    # The launcher says it once more, without a rank in front.
    (said,) = (line for line in lines if line.startswith("["))
    assert said.startswith("[0]")
    assert "2 rank(s)" in said


def _gpus():
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return listed.stdout.count("GPU ")


def test_a_damaged_data_set_is_one_sentence(tmp_path):
    (tmp_path / "own.npz").write_bytes(b"PK\x03\x04 not really")
    result = run([*TRAIN, "--dataset", "own.npz"], tmp_path)
    assert result.returncode == 1
    assert result.stderr.startswith("Error: own.npz: ")
    assert result.stderr.count("\n") == 1
