"""What is submitted to Horovod does not wait for the end of a cycle."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from train_runs import SECONDS, launcher, started

RANK = Path(__file__).with_name("cycles_rank.py")
CYCLE_SECONDS = 4
TURNS = 20


@pytest.mark.parametrize(
    ("framework", "ranks"),
    [
        ("torch", 2),
        pytest.param("torch", 4, marks=pytest.mark.slow),
        pytest.param("tensorflow", 2, marks=pytest.mark.slow),
    ],
)
def test_reductions_begin_when_the_last_rank_has_submitted_them(framework, ranks, tmp_path):
    pytest.importorskip(framework)
    command = [*launcher(ranks), sys.executable, RANK, framework, str(TURNS)]
    cycle = str(1000 * CYCLE_SECONDS)
    with started(command, tmp_path, HOROVOD_CYCLE_TIME=cycle, OMP_NUM_THREADS="1") as process:
        assert process.wait(SECONDS) == 0
    output = (tmp_path / "output").read_text()
    (took,) = (line.split()[-1] for line in output.splitlines() if "took " in line)
    # A cycle for each would be 80 seconds; what they take themselves is less than one.
    assert float(took) < TURNS * CYCLE_SECONDS / 4
