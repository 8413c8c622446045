"""What tests on clusters have in common: a cluster's ranks run on two crowded cores."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: To start ranks, and to end: several processes of a cluster share the cores with them.
SECONDS = 600


@pytest.fixture
def accuracy(tmp_path):
    """Runs an example on a part of MNIST, and gives the accuracy that it tells at its end."""

    def learn(name):
        result = subprocess.run(
            [sys.executable, ROOT / "examples" / name, "--epochs", "1", "--samples", "16000"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert result.returncode == 0, f"{result.stdout}\n{result.stderr[-4000:]}"
        return float(re.search(r"^test accuracy ([\d.]+)%", result.stdout, re.M)[1])

    return learn
