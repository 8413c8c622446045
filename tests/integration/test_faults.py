"""Each fault in each framework, over Gloo and MPI: the run ends soon, and says what was wrong.

Nothing may be left running, the exit code is not 0, the report names the rank and the tensor, and
the checkpoints before the fault are whole.
"""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from train_runs import environment, ranks_of, started, succeed, wait_for

from tests.faults import Fault, at

SCRIPT = Path(__file__).with_name("faulty_rank.py")
# Of a wait, in seconds; and what a machine under load may need beyond it, to start and to end.
LIMIT = 5
BEYOND = 175


@dataclass(frozen=True)
class Expected:
    """A fault, what the output has to hold, and the exit code where it is the fault's own."""

    fault: Fault
    report: str
    code: int = 1


# At step 3 the checkpoint of step 2 is on disk.
FAULTS = {
    "raises": Expected(at(3, 1).raises(), r"rank 1 .*RuntimeError: out of cheese"),
    "exits": Expected(at(3, 1).exits(7), r"rank 1 .*(exit|code|status).* 7", code=7),
    "ends early": Expected(at(3, 1).exits(0), r"rank 1 .*finished"),
    "is killed": Expected(at(3, 1).is_killed(), r"rank 1 .*(SIGKILL|signal 9|died)", code=137),
    "is stopped": Expected(at(3, 1).is_stopped(), r"rank 1.*does not answer"),
    "spins": Expected(at(3, 1).spins(), r"of the user.*rank 1.*faults\.py:\d+"),
    "skips": Expected(at(3, 1).skips_reduction(), r"of the user.*rank 1"),
    "reduces alone": Expected(
        at(3, 0).reduces_alone(), r"of the user.*faults\.py:\d+.*rank == self\.rank"
    ),
    "other shape": Expected(
        at(3, 1).reduces_other_shape(), r"of the user.*rank 0.*\b3\b.*rank 1.*\b6\b"
    ),
    "nan": Expected(at(3, 1).poisons(), r"NonFiniteGradient: .*rank 1"),
    "bit of a parameter": Expected(
        at(3, 1).flips_bit("weight|kernel"), r"ReplicaMismatch: .*(weight|kernel).*rank 1 differs"
    ),
    "bit of a momentum": Expected(
        at(3, 1).flips_bit("momentum"), r"ReplicaMismatch: .*momentum.*rank 1 differs"
    ),
    "bit of a buffer": Expected(
        at(3, 1).flips_bit("ing_mean"), r"ReplicaMismatch: .*ing_mean.*rank 1 differs"
    ),
}

STACKS = {
    "torch": ("torch", "torch"),
    "tensorflow": ("tensorflow", "tensorflow"),
    "keras-tensorflow": ("keras", "tensorflow"),
    "keras-torch": ("keras", "torch"),
}
# Run each time; further ones with the slow tests; all of them by `make faults`.
QUICK = [
    ("torch", "is killed", "gloo", 2),
    ("torch", "nan", "mpi", 2),
    ("tensorflow", "raises", "gloo", 2),
]
SLOW = [
    ("keras-torch", "reduces alone", "gloo", 2),
    ("keras-tensorflow", "bit of a momentum", "gloo", 2),
    ("keras-tensorflow", "skips", "gloo", 2),
    *(("torch", fault, "gloo", 2) for fault in FAULTS),
    *((stack, "is killed", "gloo", 2) for stack in STACKS),
    *(("torch", fault, "mpi", 4) for fault in ("is killed", "bit of a buffer")),
]
MATRIX = [
    (stack, fault, kind, ranks)
    for stack in STACKS
    for fault in FAULTS
    for kind in ("gloo", "mpi")
    for ranks in (2, 4)
    # Four ranks of TensorFlow start slowly; what differs there is what Gloo and MPI do.
    if stack in ("torch", "tensorflow") or kind == "gloo"
    if ranks == 2 or stack == "torch" or (fault in ("is killed", "skips") and kind == "gloo")
]


def marked(case):
    marks = () if case in QUICK else pytest.mark.slow if case in SLOW else pytest.mark.matrix
    return pytest.param(*case, marks=marks, id="-".join(map(str, case)).replace(" ", "_"))


@pytest.mark.parametrize(("stack", "name", "kind", "ranks"), [marked(case) for case in MATRIX])
def test_a_fault_ends_the_run_with_a_report(stack, name, kind, ranks, tmp_path):
    if kind == "mpi" and shutil.which("mpirun", path=environment()["PATH"]) is None:
        pytest.skip("there is no mpirun")
    framework, backend = STACKS[stack]
    expected = FAULTS[name]
    command = ["horovodrun", f"--{kind}", "-np", str(ranks)]
    command += [sys.executable, SCRIPT, framework, tmp_path / "saved"]
    variables = {
        **expected.fault.environment(),
        "HVDSYNC_WAIT_LIMIT": str(LIMIT),
        "KERAS_BACKEND": backend,
        "OMP_NUM_THREADS": "1",
    }
    with started(command, tmp_path, **variables) as process:
        running = wait_for(lambda: all_ranks(process, ranks), process, "all ranks run")
        code = process.wait(LIMIT + BEYOND)
        _, alive = psutil.wait_procs(running, timeout=5)
    output = (tmp_path / "output").read_text()
    assert not alive, output
    assert re.search(expected.report, output, re.DOTALL), output
    assert code == expected.code, output
    assert "step-00000002" in succeed(
        [sys.executable, "-m", "hvdsync", "checkpoint", "verify", "saved"], tmp_path
    )


def all_ranks(process, ranks):
    found = ranks_of(process)
    return found if len(found) == ranks else None


@pytest.mark.slow
def test_without_a_fault_the_same_run_ends_well(tmp_path):
    for framework in ("torch", "tensorflow", "keras"):
        saved = tmp_path / framework
        succeed(
            ["horovodrun", "--gloo", "-np", "2", sys.executable, SCRIPT, framework, saved], tmp_path
        )
        assert (saved / "step-00000006").is_dir()
