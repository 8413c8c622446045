"""Starting ``python -m hvdsync.train`` and examples as a user does, and reading what they leave."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
TRAIN = ("python", "-m", "hvdsync.train")
SECONDS = 240


def launcher(ranks: int) -> tuple[str, ...]:
    """The start of a command line that runs what follows on so many ranks."""
    return ("horovodrun", "--gloo", "-np", str(ranks))


def run(command: Sequence[str | Path], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder`` with this Python's own programs, and wait for it."""
    environ = dict(os.environ)
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    environ["PYTHONPATH"] = str(ROOT)
    environ["COLUMNS"] = "200"
    # Threads are a matter of the command, and the test's own environment may have set them.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KERAS_BACKEND"):
        environ.pop(name, None)
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def succeed(command: Sequence[str | Path], folder: Path) -> str:
    """The standard output of a command that must end well."""
    result = run(command, folder)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def weights(checkpoint: Path) -> list[np.ndarray]:
    """The model in a checkpoint's folder, opened by its framework alone, in Keras's layout."""
    if (checkpoint / "model.pt").exists():
        import torch

        state: dict[str, Any] = torch.load(checkpoint / "model.pt", weights_only=True)
        # Filters (out, in, h, w) and kernels (out, in) to (h, w, in, out) and (in, out).
        order = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}
        arrays = [tensor.numpy() for tensor in state.values()]
        return [array.transpose(order[array.ndim]) for array in arrays]
    import keras

    return keras.models.load_model(checkpoint / "model.keras").get_weights()


def newest(directory: Path) -> Path:
    """The newest checkpoint of a folder."""
    return max(directory.glob("step-*"))
