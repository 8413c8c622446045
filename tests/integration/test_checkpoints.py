"""Checkpoints of whole runs: what a restore costs in memory, and a rank that fails alone."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from train_runs import launcher, run, succeed

from hvdsync.checkpoint.store import Store

HERE = Path(__file__).parent
CHUNK = 64  # MB


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "keras"])
def test_restoring_holds_one_more_copy_of_the_state_and_some_messages(framework, tmp_path):
    script = ("python", HERE / "restore_memory.py", framework)
    succeed([*launcher(2), *script, "save", "run"], tmp_path)
    said = succeed([*launcher(2), *script, "restore", "run"], tmp_path)
    found = re.search(r"state (\d+) MB, more at the peak by rank: (\d+) (\d+)", said)
    state, *more = map(int, found.groups())
    # A message is there as it is sent, as it is received, and as the framework hands it over.
    assert max(more) < state + 4 * CHUNK < 2 * state
    assert min(more) > state / 2  # what was measured is the restore


@pytest.mark.parametrize("way", ["with", pytest.param("finally", marks=pytest.mark.slow)])
def test_a_rank_that_fails_alone_does_not_wait_in_close_for_the_others(way, tmp_path):
    started = time.monotonic()
    result = run([*launcher(2), "python", HERE / "fails_alone.py", way, "run"], tmp_path)
    assert result.returncode != 0
    assert "ZeroDivisionError: rank 1 alone" in result.stderr
    # Horovod itself would wait for minutes; starting takes most of this on a busy machine.
    assert time.monotonic() - started < 60
    assert Store(tmp_path / "run", 1).newest_whole()[1]["step"] == 1
