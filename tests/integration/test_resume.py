"""Runs that are killed with SIGKILL and resumed end with the bits of an undisturbed one."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from killed_runs import OPTIONS, make_data
from train_runs import (
    SECONDS,
    environment,
    events,
    launcher,
    newest,
    ranks_of,
    started,
    succeed,
    wait_for,
    weights,
)

HERE = Path(__file__).parent
# Framework, Keras's backend, kills: those of the first three lines alone are fifty.
KILLED = [
    ("torch", "torch", 22),
    pytest.param("tensorflow", "tensorflow", 16, marks=pytest.mark.matrix),
    pytest.param("keras", "tensorflow", 12, marks=pytest.mark.matrix),
    pytest.param("keras", "torch", 4, marks=pytest.mark.matrix),
    ("keras", "tensorflow", 4),
]


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "backend", "kills"), KILLED)
def test_a_run_that_is_killed_again_and_again_ends_with_the_bits_of_an_undisturbed_one(
    framework, backend, kills, tmp_path
):
    worker = HERE / "killed_runs.py"
    result = subprocess.run(
        [sys.executable, worker, framework, tmp_path, "7", str(kills)],
        env={**environment(), "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["kills"] == kills
    assert told["in_saves"] == kills // 2
    assert told["step"] == "step-00000156"
    assert told["same_weights"]
    # Loss and accuracy of every epoch, though it was read in parts.
    assert told["same_numbers"]
    # They did go on from different places; each save waits for the one before to be on disk.
    assert len(set(told["resumed_from"])) > kills // 12


HALTING = ("python", HERE / "halting_rank.py")


def command(framework, name, *more):
    own = ("--checkpoint-dir", name, "--log-dir", f"{name}-log")
    return (*HALTING, "--framework", framework, "--dataset", "data", *OPTIONS, *own, *more)


def killed(folder, framework, victim, step, *more):
    """A run on two ranks of which ``victim`` is killed at ``step``; all of it is gone then."""
    (folder / "halted").unlink(missing_ok=True)
    how = {"launcher": "0:{}:signal", "all": "0:{}:hold"}.get(victim, "{1}:{0}:die")
    halt = how.format(step, victim)
    start = [*launcher(2), *command(framework, "killed", *more)]
    with started(start, folder, HALT=halt) as process:
        ranks = wait_for(lambda: len(found := ranks_of(process)) == 2 and found, process, "ranks")
        if victim in ("launcher", "all"):
            wait_for((folder / "halted").exists, process, "rank 0 halts")
            process.kill()
        if victim == "all":
            for rank in ranks:
                rank.kill()
        assert process.wait(SECONDS) != 0
        _, alive = psutil.wait_procs(ranks, timeout=SECONDS)
        assert not alive


# Each rank alone, but for every third step and the checkpoints, after every other.
DILOCO = ("--update", "diloco", "--period", "3", "--update-warmup", "2")
# Each rank remembers what it did not send.
ONEBIT = ("--compression", "onebit")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "kills", "rule"),
    [
        ("torch", [(1, 3), ("all", 4), ("launcher", 3)], ()),
        # After the warm-up, when the rate is set no more but by who resumes.
        ("tensorflow", [(1, 17)], ()),
        ("keras", [(0, 17)], ()),
        pytest.param("torch", [(1, 8)], DILOCO, marks=pytest.mark.matrix),
        ("keras", [(0, 17)], DILOCO),
        pytest.param("torch", [(1, 8)], ONEBIT, marks=pytest.mark.matrix),
        pytest.param("tensorflow", [(1, 17)], ONEBIT, marks=pytest.mark.matrix),
        ("keras", [(1, 8)], ONEBIT),
    ],
)
def test_two_ranks_end_with_the_bits_of_an_undisturbed_run_whoever_is_killed(
    framework, kills, rule, tmp_path
):
    make_data(tmp_path / "data")
    succeed([*launcher(2), *command(framework, "whole", *rule)], tmp_path)
    for victim, step in kills:
        killed(tmp_path, framework, victim, step, *rule)
    succeed([*launcher(2), *command(framework, "killed", *rule)], tmp_path)
    told = events(tmp_path / "killed-log")
    resumed = [event["resumed_from"] for event in told if event["event"] == "run"]
    assert len(resumed) == 1 + len(kills)
    # What is killed at step n of its own had saved after every other step, or is writing that.
    assert all(later >= (earlier or 0) for earlier, later in itertools.pairwise(resumed[1:]))
    if "launcher" in dict(kills):
        # The ranks saw that it was gone, saved and ended; nobody read their output any more.
        assert next(e["reason"] for e in told if e["event"] == "stopped").startswith("SIGTERM")
    whole, after = (weights(newest(tmp_path / name)) for name in ("whole", "killed"))
    assert all(np.array_equal(a, b) for a, b in zip(whole, after, strict=True))


@pytest.mark.slow
def test_at_other_numbers_of_ranks_each_sample_of_an_epoch_is_trained_on_once(tmp_path):
    # Of 203 samples, seven steps of two ranks: the first two runs end in the second epoch.
    sizes, steps = (2, 1, 3), (9, 4)
    make_data(tmp_path / "data")
    reads = tmp_path / "reads"
    reads.mkdir()
    for size, step in zip(sizes, steps, strict=False):
        for mark in ("halted", "signalled"):
            (tmp_path / mark).unlink(missing_ok=True)
        start = [*(launcher(size) if size > 1 else ()), *command("torch", "run", "--no-augment")]
        with started(start, tmp_path, HALT=f"0:{step}:signal", READS=str(reads)) as process:
            wait_for((tmp_path / "halted").exists, process, "rank 0 halts")
            (ranks_of(process) if size > 1 else [psutil.Process(process.pid)])[0].send_signal(
                signal.SIGUSR1
            )
            assert process.wait(SECONDS) == 0, (tmp_path / "output").read_text()
    os.environ["READS"] = str(reads)
    try:
        size = sizes[-1]
        start = [*(launcher(size) if size > 1 else ()), *command("torch", "run", "--no-augment")]
        succeed(start, tmp_path)
    finally:
        del os.environ["READS"]
    told = [
        event["resumed_from"] for event in events(tmp_path / "run-log") if "resumed_from" in event
    ]
    assert told[0] is None and len(told) == len(sizes) and all(told[1:])
    counts = {epoch: Counter() for epoch in range(3)}
    for notes in reads.iterdir():
        for line in notes.read_text().splitlines():
            epoch, samples = json.loads(line)
            counts[epoch].update(samples)
    for epoch, count in counts.items():
        assert count == Counter(range(203)), epoch
