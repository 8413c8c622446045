"""``hvdsync.run`` on this machine: results by rank, the failing rank's own traceback, ends."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest
from train_runs import SECONDS, environment, started, succeed, wait_for

FUNCTIONS = Path(__file__).with_name("run_functions.py")

pytest.importorskip("torch")


def start(name, *options):
    return (sys.executable, FUNCTIONS, name, *options)


def test_results_come_back_in_order_and_output_as_it_was_written(tmp_path):
    output = succeed(start("add"), tmp_path)
    assert [line for line in output.splitlines() if line.startswith("came")] == [
        "came: (0, 2, 21.0, 'two words')",
        "came: (1, 2, 21.0, 'two words')",
    ]
    assert {"[0]<stdout>:rank 0 is here", "[1]<stdout>:rank 1 is here"} <= set(output.splitlines())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun", path=environment()["PATH"]) is None, reason="no mpirun")
def test_ranks_may_talk_over_mpi(tmp_path):
    output = succeed(start("add", "over=mpi"), tmp_path)
    assert output.count("came: ") == 2
    assert "came: (1, 2, 21.0, 'two words')" in output


@pytest.mark.slow
def test_the_error_is_the_failing_ranks_own_traceback(tmp_path):
    output = succeed(start("fail"), tmp_path)
    end = output[output.index("failed: ") :].splitlines()
    assert end[0] == "failed: rank 1, cause ValueError('nothing to add to 10')"
    assert end[1] == "rank 1 of 2 raised ValueError: nothing to add to 10"
    assert end[2] == "Traceback (most recent call last):"
    assert end[3].endswith("in fail")
    assert end[-1] == "ValueError: nothing to add to 10"


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_with_its_signal(tmp_path):
    output = succeed(start("die"), tmp_path)
    assert "failed: rank None, cause None" in output
    assert "rank 1 of 2 on localhost failed first: ended by SIGKILL" in output


def processes(folder):
    return [psutil.Process(int((folder / f"started-{rank}").read_text())) for rank in (0, 1)]


def have_started(folder):
    return all((folder / f"started-{rank}").exists() for rank in (0, 1))


def have_ended(folder):
    return all((folder / f"ended-{rank}").exists() for rank in (0, 1))


@pytest.mark.slow
def test_an_interrupt_lets_ranks_end_well(tmp_path):
    with started(start("wait"), tmp_path) as process:
        wait_for(lambda: have_started(tmp_path), process, "ranks are at work")
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 0
    assert have_ended(tmp_path)
    assert (tmp_path / "output").read_text().splitlines()[-1] == "interrupted"


@pytest.mark.slow
def test_ranks_end_with_who_started_them(tmp_path):
    with started(start("wait"), tmp_path) as process:
        wait_for(lambda: have_started(tmp_path), process, "ranks are at work")
        ranks = processes(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(SECONDS)
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    assert have_ended(tmp_path)
