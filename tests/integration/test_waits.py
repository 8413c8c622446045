"""A rank that does not come, whatever its reason: all ranks say whom they wait for, and end."""

from __future__ import annotations

import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from train_runs import SECONDS, environment, ranks_of, started, wait_for

RANK = Path(__file__).with_name("waiting_rank.py")
LIMIT = 8
PREFIX = re.compile(r"^\[(?:1,)?(\d+)\]<std(?:err|out)>:\s*(.*)$")

SLOW = pytest.mark.slow
# What is said in all of them; that each ends in every world is test_faults.py's matter.
WORLDS = [
    ("torch", "--gloo", 2, ()),
    ("torch", "--gloo", 4, pytest.mark.matrix),
    ("torch", "--mpi", 4, SLOW),
    ("tensorflow", "--gloo", 2, SLOW),
    ("keras", "--mpi", 2, pytest.mark.matrix),
]


@pytest.fixture(
    params=[pytest.param(w[:3], marks=w[3], id=" ".join(map(str, w[:3]))) for w in WORLDS]
)
def world(request):
    framework, controller, _ = request.param
    pytest.importorskip(framework)
    if controller == "--mpi" and shutil.which("mpirun", path=environment()["PATH"]) is None:
        pytest.skip("there is no mpirun")
    return request.param


def end_of(world, reason, folder):
    """Exit code of a run, the lines of each rank, and all its output; nothing is left of it."""
    framework, controller, size = world
    command = ["horovodrun", controller, "-np", str(size), sys.executable, RANK, framework, reason]
    variables = {"HVDSYNC_WAIT_LIMIT": str(LIMIT), "OMP_NUM_THREADS": "1"}
    with started(command, folder, **variables) as process:
        ranks = wait_for(
            lambda: found if len(found := ranks_of(process)) == size else None,
            process,
            "all ranks are there",
        )
        code = process.wait(SECONDS)
        _, alive = psutil.wait_procs(ranks, timeout=SECONDS)
        assert not alive
    output = (folder / "output").read_text()
    said = defaultdict(list)
    for line in output.splitlines():
        if match := PREFIX.match(line):
            said[int(match[1])].append(match[2])
    return code, {rank: "\n".join(lines) for rank, lines in said.items()}, output


def name_of(framework):
    """A part of the name of what waits in the fourth step."""
    return "DistributedSGD" if framework == "keras" else "loss_3"


def assert_reported(text, framework, size, *, by):
    """The report of rank ``by`` on the last rank, which has not come."""
    came = ", ".join(map(str, range(size - 1)))
    come = f"rank{'s' if size > 2 else ''} {came}"
    assert re.search(
        rf"rank {by} of {size}: collective '\S*{name_of(framework)}\S*' has waited \d+ s for "
        rf"rank {size - 1} \(limit {LIMIT} s\)",
        text,
    ), text
    waits = rf"\S*{name_of(framework)}\S*: for \d+ s; come: {come}; not come: rank {size - 1}"
    assert re.search(waits, text), text
    assert re.search(rf"\nrank 0 waits for \S+ at \S*{RANK.name}:\d+ in ", text)


def test_a_rank_in_an_endless_loop_is_told_with_its_line(world, tmp_path):
    framework, _, size = world
    code, said, output = end_of(world, "spin", tmp_path)
    assert code == 1, output
    # The one that has not come says so as well.
    for rank in range(size):
        assert_reported(said[rank], framework, size, by=rank)
        place = (
            rf"rank {size - 1} lives, and is in no collective, but at \S*{RANK.name}:\d+ in spin"
        )
        assert re.search(place, said[rank])
        assert re.search(rf"Stack of rank {size - 1}:\n(.*\n)+.* in misbehave\n", said[rank])
    assert "StalledRank: rank 0 of" in output


@SLOW
def test_a_stopped_process_is_told_as_that(world, tmp_path):
    framework, _, size = world
    code, said, output = end_of(world, "stop", tmp_path)
    assert code == 1, output
    for rank in range(size - 1):
        assert_reported(said[rank], framework, size, by=rank)
        assert re.search(
            rf"rank {size - 1} does not answer: its process \d+ is stopped \(SIGSTOP\)", said[rank]
        )


def test_a_collective_under_a_condition_on_the_rank_is_told_with_its_line(world, tmp_path):
    framework, _, size = world
    if framework == "keras":
        pytest.skip("its steps are those of fit")
    code, said, output = end_of(world, "condition", tmp_path)
    assert code == 1, output
    line = 1 + RANK.read_text().splitlines().index("            if hvd.rank() == 0:")
    for rank in range(size):
        assert re.search(r"collective '\S*of_rank_0_alone' has waited", said[rank])
        assert re.search(r"of_rank_0_alone: for \d+ s; come: rank 0; not come: ", said[rank])
        assert re.search(
            "A collective under a condition on the rank: rank 0 waits inside\n"
            rf"\S*{RANK.name}:{line}: if hvd.rank\(\) == 0:\n",
            said[rank],
        )


@SLOW
def test_a_skipped_reduction_is_told_with_both_names(world, tmp_path):
    framework, _, size = world
    if framework == "keras":
        pytest.skip("its steps are those of fit")
    code, said, output = end_of(world, "skip", tmp_path)
    assert code == 1, output
    for rank in range(size):
        assert re.search(rf"loss_3: for \d+ s; come: .*; not come: rank {size - 1}\n", said[rank])
        assert re.search(rf"loss_4: for \d+ s; come: rank {size - 1}; not come: rank", said[rank])


def test_a_rank_that_raises_is_the_reason_on_the_others_and_comes_last(world, tmp_path):
    _, controller, size = world
    code, said, output = end_of(world, "raise", tmp_path)
    assert code == 1, output
    assert said[size - 1].rstrip().splitlines()[-1] == "ValueError: rank 1's own mistake"
    told = [r for r in range(size - 1) if "RankFailed" in said[r]]
    for rank in told:
        assert (
            f"RankFailed: rank {rank} of {size} cannot go on: rank {size - 1} raised ValueError: "
            "rank 1's own mistake. Its traceback:\n"
        ) in said[rank]
    assert "HorovodInternalError" not in output
    if controller == "--gloo":
        assert output.rstrip().endswith("ValueError: rank 1's own mistake")


def test_a_killed_rank_is_the_reason_on_the_others(world, tmp_path):
    _, controller, size = world
    code, said, output = end_of(world, "kill", tmp_path)
    assert code == 137, output
    # The launcher ends the others at the same moment, and says why.
    first = said.get(0, "")
    if "RankFailed" in first:
        assert f"cannot go on: rank {size - 1} died without a word" in first
    if controller == "--gloo":
        assert f"rank {size - 1} of {size} on localhost failed first: ended by SIGKILL" in output
    else:
        assert f"rank {size - 1}" in output and "signal" in output


@SLOW
@pytest.mark.parametrize(("reason", "code"), [("finish", 1), ("exit", 3)])
def test_a_rank_that_ends_early_is_the_reason_on_the_others(reason, code, world, tmp_path):
    _, _, size = world
    found, said, output = end_of(world, reason, tmp_path)
    assert found == code, output
    expected = f"RankFailed: rank 0 of {size} cannot go on: rank {size - 1} finished its script"
    assert expected in said[0]


@pytest.mark.slow
def test_the_error_can_be_caught_and_has_the_report(world, tmp_path):
    framework, _, size = world
    if framework != "torch":
        pytest.skip("graphs raise the framework's own errors")
    code, said, output = end_of(world, "catch", tmp_path)
    # Those that wait catch it; the one that has not come is ended.
    assert code in (1, 7), output
    assert re.search(rf"caught rank 0 of {size}: collective '\S*loss_3' has waited", said[0])
    assert said[0].count("What waits:") == 2
