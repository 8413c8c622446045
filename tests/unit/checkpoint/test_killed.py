"""SIGKILL while saving: what was saved is never lost, and never half there."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MODES = ["blocking", "background"]


def run(*arguments):
    """What the script prints: the number of processes that it killed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.checkpoint.killed", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("mode", MODES)
def test_killed_at_any_file_operation_the_newest_checkpoint_is_whole(tmp_path, mode):
    assert run("points", tmp_path, mode) > 30


@pytest.mark.parametrize("mode", MODES)
def test_killed_at_random_moments_no_finished_save_is_lost(tmp_path, mode):
    assert run("moments", tmp_path, mode, 7, 25) == 25
