"""Signals to a rank, to all ranks, to the launcher: the run saves, ends, and can be taken up."""

from __future__ import annotations

import shutil
import signal

import numpy as np
import psutil
import pytest
from killed_runs import make_data
from test_resume import command
from train_runs import (
    SECONDS,
    TRAIN,
    environment,
    events,
    launcher,
    newest,
    ranks_of,
    run,
    started,
    succeed,
    wait_for,
    weights,
)

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2")
ENDLESS = ("--epochs", "100000", "--model", "linear")


@pytest.fixture
def folder(tmp_path):
    make_data(tmp_path / "data")
    return tmp_path


def launched(kind):
    if kind == "gloo":
        return launcher(2)
    if shutil.which("mpirun", path=environment()["PATH"]) is None:
        pytest.skip("there is no mpirun")
    return MPIRUN


@pytest.mark.parametrize(
    ("kind", "target", "number"),
    [
        ("gloo", 1, signal.SIGTERM),
        pytest.param("gloo", "all", signal.SIGUSR1, marks=pytest.mark.slow),
        ("gloo", "launcher", signal.SIGTERM),
        pytest.param("mpi", "all", signal.SIGTERM, marks=pytest.mark.slow),
        ("mpi", "launcher", signal.SIGUSR1),
    ],
)
def test_a_signal_makes_all_ranks_save_and_end(kind, target, number, folder):
    start = launched(kind)
    halting = target if isinstance(target, int) else 0
    with started(
        [*start, *command("torch", "run", *ENDLESS)], folder, HALT=f"{halting}:40:signal"
    ) as process:
        wait_for((folder / "halted").exists, process, "a rank halts")
        ranks = ranks_of(process)
        assert len(ranks) == 2
        to = {"all": ranks, "launcher": [process]}.get(target) or [ranks[target]]
        for receiver in to:
            receiver.send_signal(number)
        code = process.wait(SECONDS)
        _, alive = psutil.wait_procs(ranks, timeout=SECONDS)
        assert not alive
    output = (folder / "output").read_text()
    (stopped,) = (event for event in events(folder / "run-log") if event["event"] == "stopped")
    # The rank that halts has done forty steps; a verdict falls at every step here.
    assert stopped["step"] == 40
    assert stopped["checkpoint"] == "run/step-00000040"
    name = "SIGTERM" if number == signal.SIGTERM else "SIGUSR1"
    # Signals to several ranks may arrive a step apart.
    assert stopped["reason"].startswith(f"{name} on rank ")
    if isinstance(target, int):
        assert stopped["reason"] == f"{name} on rank {target}"
    assert newest(folder / "run").name == "step-00000040"
    assert f"ended early by {stopped['reason']}: step 40 is saved" in output
    assert code == 0, output
    if (kind, target) == ("gloo", "all"):
        again = [*start, *command("torch", "run", "--model", "linear", "--epochs", "6")]
        # Seven steps of two ranks in each epoch.
        assert "going on within epoch 6, after step 40, of run" in succeed(again, folder)
        assert newest(folder / "run").name == "step-00000042"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "rule"),
    [
        ("torch", ("--update", "local-sgd", "--fragments", "3")),
        ("tensorflow", ("--update", "diloco")),
        ("keras", ("--update", "local-sgd")),
    ],
)
def test_ranks_that_train_alone_end_where_they_meet_and_go_on_to_the_same_bits(
    framework, rule, folder
):
    # They meet after the second step, and after every third from there.
    rule = (*rule, "--period", "3", "--update-warmup", "2", "--checkpoint-every", "11")
    succeed([*launcher(2), *command(framework, "whole", *rule)], folder)
    start = [*launcher(2), *command(framework, "run", *rule)]
    with started(start, folder, HALT="1:9:signal") as process:
        wait_for((folder / "halted").exists, process, "rank 1 halts")
        ranks_of(process)[1].send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0, (folder / "output").read_text()
    (stopped,) = (event for event in events(folder / "run-log") if event["event"] == "stopped")
    assert (stopped["step"], stopped["reason"]) == (11, "SIGTERM on rank 1")
    assert "after step 11, of run" in succeed(start, folder)
    whole, after = (weights(newest(folder / name)) for name in ("whole", "run"))
    assert all(np.array_equal(a, b) for a, b in zip(whole, after, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "tensorflow", "keras"])
def test_ranks_at_their_own_pace_end_at_one_step_and_go_on_from_there(framework, folder):
    own_pace = [*launched("mpi"), *command(framework, "run", "--model", "linear")]
    own_pace += ["--update", "async", "--checkpoint-every", "4"]
    with started([*own_pace, "--epochs", "100000"], folder, HALT="1:40:signal") as process:
        wait_for((folder / "halted").exists, process, "rank 1 halts")
        # Rank 0 has gone on to the end of the epoch, of seven steps, at most.
        ranks_of(process)[1].send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0, (folder / "output").read_text()
    (stopped,) = (event for event in events(folder / "run-log") if event["event"] == "stopped")
    assert stopped["reason"] == "SIGTERM on rank 1"
    assert 40 <= stopped["step"] <= 42
    assert newest(folder / "run").name == f"step-{stopped['step']:08}"
    output = succeed([*own_pace, "--epochs", "8"], folder)
    assert f"after step {stopped['step']}, of run" in output
    assert newest(folder / "run").name == "step-00000056"


@pytest.mark.slow
def test_keras_leaves_fit_in_the_midst_of_an_epoch(folder):
    start = [*launcher(2), *command("keras", "run", *ENDLESS)]
    with started(start, folder, HALT="1:10:signal") as process:
        wait_for((folder / "halted").exists, process, "rank 1 halts")
        ranks_of(process)[1].send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0, (folder / "output").read_text()
    assert newest(folder / "run").name == "step-00000010"
    assert "ended early by SIGTERM on rank 1: step 10" in (folder / "output").read_text()


def test_verdicts_need_no_exchange_at_each_step(folder):
    # As a user starts it: ranks exchange some times a second, and agree all the same.
    own = ("--dataset", "data", "--device", "cpu", "--checkpoint-dir", "run", "--log-dir", "log")
    with started([*launcher(2), *TRAIN, *own, *ENDLESS], folder) as process:
        wait_for(
            lambda: any(event["event"] == "step" for event in events(folder / "log")),
            process,
            "steps are taken",
        )
        ranks_of(process)[1].send_signal(signal.SIGUSR1)
        assert process.wait(SECONDS) == 0, (folder / "output").read_text()
    (stopped,) = (event for event in events(folder / "log") if event["event"] == "stopped")
    assert stopped["reason"] == "SIGUSR1 on rank 1"
    assert newest(folder / "run").name == f"step-{stopped['step']:08d}"


def test_a_second_signal_ends_the_process_at_once(folder):
    start = command("torch", "run", *ENDLESS)
    with started(start, folder, HALT="0:5:second") as process:
        wait_for((folder / "halted").exists, process, "it halts")
        wait_for((folder / "run" / "step-00000004").exists, process, "step 4 is on disk")
        process.send_signal(signal.SIGTERM)
        wait_for((folder / "signalled").exists, process, "the first signal has come")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(SECONDS) == -signal.SIGUSR1
    # It had no time for a checkpoint of step 5.
    assert newest(folder / "run").name == "step-00000004"


def test_a_time_limit_saves_and_ends_with_the_code_that_was_chosen(folder):
    limited = command("torch", "run", *ENDLESS, "--max-time", "4s", "--stop-code", "75")
    result = run(limited, folder)
    assert result.returncode == 75, result.stderr
    (stopped,) = (event for event in events(folder / "run-log") if event["event"] == "stopped")
    assert stopped["reason"] == "the time limit of 4 s on rank 0"
    assert newest(folder / "run").name == f"step-{stopped['step']:08d}"
    # The same again goes on, and is over at once: the limit is that of each start.
    second = run(limited, folder)
    assert second.returncode == 75
    assert f"step {stopped['step']}, of run" in second.stdout
