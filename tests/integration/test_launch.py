"""Launches beside others: unknown launchers, two jobs, forked workers, two front doors."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from train_runs import SECONDS, environment, launcher, run, succeed

pytestmark = pytest.mark.slow

MPI_SLOWLY = pytest.param("mpi", marks=pytest.mark.slow)
RANK = Path(__file__).with_name("neighbours_rank.py")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2")
FRAMEWORKS = ["torch", "tensorflow"]


def needs(framework):
    pytest.importorskip(framework)


def two_ranks(controller):
    """The start of a command line for two ranks."""
    if controller == "mpi" and shutil.which("mpirun", path=environment()["PATH"]) is None:
        pytest.skip("there is no mpirun")
    return ("horovodrun", f"--{controller}", "-np", "2")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_two_processes_of_a_launcher_that_nobody_speaks_refuse_to_train_alone(framework, tmp_path):
    needs(framework)
    # As MPICH's does, for a Horovod that was built with another MPI or none.
    started = [
        subprocess.Popen(
            [sys.executable, RANK, "init", framework],
            cwd=tmp_path,
            env={
                **environment(),
                "PMI_RANK": str(rank),
                "PMI_SIZE": "2",
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for rank, process in enumerate(started):
        output, errors = process.communicate(timeout=SECONDS)
        assert process.returncode == 1
        assert "of 1" not in output
        last = errors.strip().splitlines()[-1]
        assert last.startswith("hvdsync.errors.LaunchError: mpiexec started 2 ranks")
        assert f"(this is rank {rank}), but Horovod sees 1: each would train alone" in last
        assert "`horovodrun -np 2 ...`" in last


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_mpirun_with_a_horovod_that_has_no_mpi_is_refused(framework, tmp_path):
    needs(framework)
    two_ranks("mpi")
    without = ["-x", "HOROVOD_CONTROLLER=gloo", "-x", "HOROVOD_CPU_OPERATIONS=gloo"]
    result = run([*MPIRUN, *without, sys.executable, RANK, "init", framework], tmp_path)
    assert result.returncode == 1
    assert "mpirun started 2 ranks (this is rank 0), but Horovod sees 1" in result.stderr


@pytest.mark.parametrize("controller", ["gloo", MPI_SLOWLY])
def test_two_jobs_on_one_host_do_not_meet(controller, tmp_path):
    needs("torch")
    start = two_ranks(controller)
    commands = [
        [str(part) for part in (*start, sys.executable, RANK, "job", number)] for number in (1, 2)
    ]
    started = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    for command, process in zip(commands, started, strict=True):
        output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output
        for rank in (0, 1):
            assert f"job {command[-1]} rank {rank} is right" in output


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_four_ranks_together_use_the_cores_of_the_node_once(framework, tmp_path):
    needs(framework)
    output = succeed([*launcher(4), sys.executable, RANK, "threads", framework], tmp_path)
    counts = [int(line.split()[-1]) for line in output.splitlines() if "threads " in line]
    assert len(counts) == 4
    assert sum(counts) <= max(4, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("controller", ["gloo", MPI_SLOWLY])
def test_workers_forked_after_init_are_safe(controller, framework, tmp_path):
    needs(framework)
    start = two_ranks(controller)
    output = succeed([*start, sys.executable, RANK, f"{framework}_loader", "lives"], tmp_path)
    assert output.count("has read all") == 2


def test_a_rank_that_dies_with_loader_workers_is_missed_at_once(tmp_path):
    needs("torch")
    # Its workers hold all its connections and its output open for some seconds.
    result = run([*launcher(2), sys.executable, RANK, "torch_loader", "killed"], tmp_path)
    assert result.returncode == 137, result.stderr
    assert "horovodrun: rank 1 of 2 on localhost failed first: ended by SIGKILL" in result.stderr


@pytest.mark.parametrize(
    ("controller", "order"),
    [
        ("gloo", "torch+tensorflow"),
        pytest.param("mpi", "tensorflow+torch", marks=pytest.mark.slow),
    ],
)
def test_a_second_front_door_is_refused_and_the_first_goes_on(controller, order, tmp_path):
    for framework in FRAMEWORKS:
        needs(framework)
    first, second = order.split("+")
    output = succeed([*two_ranks(controller), sys.executable, RANK, "both", order], tmp_path)
    reason = f"hvdsync.{first} is initialised in this process, and hvdsync.{second} cannot be"
    assert output.count(reason) == 2


DOCTOR = ("-m", "hvdsync", "doctor", "--quick")


@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("horovodrun", ("horovodrun", "--gloo", "-np", "2", "python", *DOCTOR)),
        ("mpirun", (*MPIRUN, "python", *DOCTOR)),
        ("torchrun", ("torchrun", "--standalone", "--nproc-per-node=2", *DOCTOR)),
    ],
)
def test_doctor_says_which_launcher_it_sees(launcher, command, tmp_path):
    if shutil.which(command[0], path=environment()["PATH"]) is None:
        pytest.skip(f"there is no {command[0]}")
    output = succeed(command, tmp_path)
    assert f"{launcher}: rank 0 of 2, local rank 0 of 2" in output
    assert "rank 1 of 2" not in output
