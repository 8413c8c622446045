"""A rank that runs out of memory in a step ends all of them at once, and is named."""

import re
from pathlib import Path

import pytest
from train_runs import SECONDS, launcher, started

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("memory_rank.py")
WORDS = r"(OOM when allocating|can't allocate memory)"


@pytest.mark.parametrize(
    ("framework", "backend"),
    [
        ("torch", "torch"),
        pytest.param("tensorflow", "tensorflow", marks=pytest.mark.slow),
        ("keras", "tensorflow"),
        pytest.param("keras", "torch", marks=pytest.mark.slow),
    ],
)
def test_a_rank_out_of_memory_ends_all_and_is_named(framework, backend, tmp_path):
    command = [*launcher(2), "python", SCRIPT, framework]
    with started(command, tmp_path, KERAS_BACKEND=backend, OMP_NUM_THREADS="1") as process:
        # Less than the limit of waits, which is ten minutes.
        code = process.wait(SECONDS)
    output = (tmp_path / "output").read_text()
    assert code == 1, output
    follower = r"\[0\]<stderr>:.*RankFailed: rank 0 of 2 cannot go on: rank 1 raised "
    assert re.search(follower + ".*" + WORDS, output, re.DOTALL), output
    assert re.search("the last lines on the stderr of rank 1:.*" + WORDS, output, re.DOTALL), output
