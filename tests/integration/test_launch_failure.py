"""``horovodrun`` when ranks fail or it is told to end: its exit code and its last words."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from train_runs import SECONDS, environment, launcher, ranks_of, run, started, wait_for

pytestmark = pytest.mark.slow

RANK = Path(__file__).with_name("launched_rank.py")


def command(way, ranks=2):
    return [*launcher(ranks), sys.executable, RANK, way]


@pytest.mark.parametrize(
    ("way", "code", "ending"),
    [
        ("exit", 3, "exit code 3"),
        ("kill", 137, "ended by SIGKILL (as the kernel does when memory runs out), exit code 137"),
        ("segfault", 139, "ended by SIGSEGV, exit code 139"),
        ("leave a child", 4, "exit code 4"),
    ],
)
def test_the_run_ends_with_the_first_failing_rank_s_exit_code(way, code, ending, tmp_path):
    with started(command(way), tmp_path) as process:
        assert process.wait(SECONDS) == code
    output = (tmp_path / "output").read_text()
    report = output[output.index("horovodrun: ") :]
    assert report.startswith(f"horovodrun: rank 1 of 2 on localhost failed first: {ending}\n")
    # Rank 0 was ended by the launcher.
    assert "rank 0 failed" not in report


def test_the_last_output_is_the_traceback_of_the_rank_that_failed_first(tmp_path):
    result = run(command("raise", ranks=4), tmp_path)
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    start = lines.index("horovodrun: the last lines on the stderr of rank 1:")
    assert lines[start - 1].startswith("horovodrun: rank 1 of 4 on localhost failed first: exit")
    assert lines[start + 1] == "  Traceback (most recent call last):"
    assert lines[-1] == "  ValueError: of rank 1"


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_rank_that_only_missed_the_failing_one_is_not_named_first(framework, tmp_path):
    pytest.importorskip(framework)
    result = run(command(framework), tmp_path)
    assert result.returncode == 1, result.stderr
    assert "horovodrun: rank 1 of 2 on localhost failed first: exit code 1" in result.stderr
    assert result.stderr.splitlines()[-1] == "  KeyError: 'the cause'"


@pytest.mark.parametrize("way", ["save", "save slowly"])
def test_a_signal_to_the_launcher_lets_ranks_save_and_end_well(way, tmp_path):
    # The slow ones take longer than Horovod gives to ranks that it ends.
    with started(command(way), tmp_path) as process:
        for rank in (0, 1):
            wait_for((tmp_path / f"ready-{rank}").exists, process, f"rank {rank} is up")
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0, (tmp_path / "output").read_text()
    assert (tmp_path / "saved-0").exists() and (tmp_path / "saved-1").exists()


def test_ranks_below_a_shell_script_are_reached_by_the_signal(tmp_path):
    script = tmp_path / "rank.sh"
    script.write_text(f"#!/bin/bash\n{sys.executable} {RANK} save\necho the script went on\n")
    with started([*launcher(2), "bash", script], tmp_path) as process:
        for rank in (0, 1):
            wait_for((tmp_path / f"ready-{rank}").exists, process, f"rank {rank} is up")
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0, (tmp_path / "output").read_text()
    assert (tmp_path / "output").read_text().count("the script went on") == 2


@pytest.mark.parametrize("how", ["second signal", "grace"])
def test_ranks_that_do_not_end_are_ended(how, tmp_path):
    variables = {"HVDSYNC_GRACE_SECONDS": "1"} if how == "grace" else {}
    with started(command("save never"), tmp_path, **variables) as process:
        for rank in (0, 1):
            wait_for((tmp_path / f"ready-{rank}").exists, process, f"rank {rank} is up")
        ranks = ranks_of(process)
        process.send_signal(signal.SIGTERM)
        wait_for(
            lambda: "SIGTERM is passed on" in (tmp_path / "output").read_text(),
            process,
            "the launcher says so",
        )
        if how == "second signal":
            process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 128 + signal.SIGKILL
        _, alive = psutil.wait_procs(ranks, timeout=SECONDS)
        assert not alive
    output = (tmp_path / "output").read_text()
    assert "failed first: ended by SIGKILL, exit code 137" in output
    assert "horovodrun: it had passed SIGTERM on to all ranks before" in output


def test_a_user_signal_to_the_launcher_reaches_the_ranks(tmp_path):
    with started(command("note"), tmp_path) as process:
        for rank in (0, 1):
            wait_for((tmp_path / f"ready-{rank}").exists, process, f"rank {rank} is up")
        process.send_signal(signal.SIGUSR1)
        assert process.wait(SECONDS) == 0, (tmp_path / "output").read_text()


FUNCTION = """
import horovod

def work(fails):
    import os, sys
    if fails and os.environ["HOROVOD_RANK"] == "1":
        raise ValueError("inside the function")
    return int(os.environ["HOROVOD_RANK"])

if __name__ == "__main__":
    print(horovod.run(work, args=(False,), np=2, use_gloo=True))
    try:
        horovod.run(work, args=(True,), np=2, use_gloo=True)
    except RuntimeError as error:
        print(error)
"""


def test_horovod_run_gives_results_and_raises_with_the_report(tmp_path):
    (tmp_path / "script.py").write_text(FUNCTION)
    result = run([sys.executable, "script.py"], tmp_path)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert "[0, 1]" in lines
    assert "horovodrun: rank 1 of 2 on localhost failed first: exit code 1" in lines
    assert "  ValueError: inside the function" in lines


def test_the_launcher_works_where_hvdsync_is_not_installed(tmp_path):
    blocked = tmp_path / "blocked" / "hvdsync"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ImportError('it is not here')\n")
    environ = {**environment(), "PYTHONPATH": str(blocked.parent)}
    for way, code in (("end well", 0), ("exit", 1)):
        result = subprocess.run(
            [str(part) for part in command(way)],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert result.returncode == code, result.stderr
    assert "Process name: 1\nExit code: 3" in result.stderr


@pytest.mark.parametrize(
    ("way", "code", "last"),
    [
        ("exit", 3, "horovodrun: rank 1 wrote nothing to its stderr"),
        ("raise", 1, "  ValueError: of rank 1"),
        ("segfault", 139, "horovodrun: rank 1 wrote nothing to its stderr"),
    ],
)
def test_over_mpi_too_the_failing_rank_gives_exit_code_and_last_words(way, code, last, tmp_path):
    if shutil.which("mpirun", path=environment()["PATH"]) is None:
        pytest.skip("there is no mpirun")
    result = run(["horovodrun", "--mpi", "-np", "2", sys.executable, RANK, way], tmp_path)
    assert result.returncode == code, result.stderr
    assert "horovodrun: rank 1 of 2 failed first: " in result.stderr
    assert result.stderr.splitlines()[-1] == last


@pytest.mark.parametrize(
    ("way", "number"), [("save slowly", signal.SIGTERM), ("note", signal.SIGUSR1)]
)
def test_over_mpi_too_a_signal_to_the_launcher_lets_ranks_end_well(way, number, tmp_path):
    if shutil.which("mpirun", path=environment()["PATH"]) is None:
        pytest.skip("there is no mpirun")
    start = ["horovodrun", "--mpi", "-np", "2", sys.executable, RANK, way]
    with started(start, tmp_path) as process:
        for rank in (0, 1):
            wait_for((tmp_path / f"ready-{rank}").exists, process, f"rank {rank} is up")
        process.send_signal(number)
        assert process.wait(SECONDS) == 0, (tmp_path / "output").read_text()


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_nothing_outlives_a_launcher_that_is_killed(controller, tmp_path):
    if controller == "mpi":
        if shutil.which("mpirun", path=environment()["PATH"]) is None:
            pytest.skip("there is no mpirun")
        if sys.platform != "linux":
            pytest.skip("only Linux tells a child of its parent's death")
    start = ["horovodrun", f"--{controller}", "-np", "2", sys.executable, RANK, "save"]
    with started(start, tmp_path) as process:
        for rank in (0, 1):
            wait_for((tmp_path / f"ready-{rank}").exists, process, f"rank {rank} is up")
        below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        _, alive = psutil.wait_procs(below, timeout=SECONDS)
        assert not alive
