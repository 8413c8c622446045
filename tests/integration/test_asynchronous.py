"""Ranks that train asynchronously meet in no collective: how one's end reaches the others."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from train_runs import environment, run, succeed

RANK = Path(__file__).with_name("asynchronous_rank.py")
WINDOWS = Path(__file__).with_name("windows_rank.py")
START = ("horovodrun", "--mpi", "-np", "2", sys.executable, RANK)


@pytest.fixture(autouse=True)
def mpirun():
    if shutil.which("mpirun", path=environment()["PATH"]) is None:
        pytest.skip("there is no mpirun")


@pytest.mark.slow
def test_a_rank_whose_script_has_ended_still_holds_its_part_for_the_others(tmp_path):
    output = succeed([*START, "end"], tmp_path)
    assert re.search(r"\[1,1\]<stdout>: ?ends early", output)
    assert re.search(r"\[1,0\]<stdout>: ?moved by 310$", output, re.M)


def test_an_error_of_one_rank_ends_those_that_wait_for_nobody(tmp_path):
    result = run([*START, "raise"], tmp_path)
    assert result.returncode == 1, result.stderr
    assert "KeyError: 'the cause'" in result.stderr
    assert "Segmentation fault" not in result.stderr
    assert "horovodrun: rank 1 of 2 failed first: exit code 1" in result.stderr


def test_mpi_ends_after_the_addition_that_it_is_told_to_end_in_and_no_other_follows(tmp_path):
    result = run(["mpirun", "-np", "1", sys.executable, WINDOWS], tmp_path)
    assert result.stdout == "added\n", result.stderr
    assert "RuntimeError: Horovod has been shut down, and MPI with it" in result.stderr
    assert result.returncode == 1
