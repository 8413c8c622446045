"""Starting ``python -m hvdsync.train`` and examples as a user does, and reading what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).parents[2]
TRAIN = ("python", "-m", "hvdsync.train")
SECONDS = 240


def launcher(ranks: int) -> tuple[str, ...]:
    """The start of a command line that runs what follows on so many ranks."""
    return ("horovodrun", "--gloo", "-np", str(ranks))


def environment() -> dict[str, str]:
    """The variables of a run: this Python's own programs, and none that a test may have set."""
    environ = dict(os.environ)
    environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environ["PATH"]])
    environ["PYTHONPATH"] = str(ROOT)
    environ["COLUMNS"] = "200"
    # Threads are a matter of the command, and the test's own environment may have set them.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "KERAS_BACKEND"):
        environ.pop(name, None)
    return environ


def run(
    command: Sequence[str | Path], folder: Path, seconds: float = SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder``, and wait for it."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def succeed(command: Sequence[str | Path], folder: Path, seconds: float = SECONDS) -> str:
    """The standard output of a command that must end well."""
    result = run(command, folder, seconds)
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


@contextmanager
def started(
    command: Sequence[str | Path], folder: Path, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """A command under way in ``folder``, its output in ``output``; ended, with all below it."""
    with (folder / "output").open("a") as output:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=folder,
            env={**environment(), **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    below: list[psutil.Process] = []
    try:
        yield process
        below = descendants(process)
    finally:
        # Ranks outlive a launcher that was killed, for some seconds.
        below += [p for p in descendants(process) if p not in below]
        if process.poll() is None:
            process.kill()
        process.wait()
        for other in below:
            with suppress(psutil.NoSuchProcess):
                other.kill()
        psutil.wait_procs(below, timeout=SECONDS)


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes below a launcher."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The Python process of each rank below a launcher, in order of rank."""
    found = {}
    for child in descendants(process):
        with suppress(psutil.NoSuchProcess):
            variables = child.environ()
            rank = variables.get("HOROVOD_RANK", variables.get("OMPI_COMM_WORLD_RANK"))
            if rank is not None and child.name().startswith("python"):
                found[int(rank)] = child
    return [found[rank] for rank in sorted(found)]


def wait_for(happened: Callable[[], Any], process: subprocess.Popen[str], what: str) -> Any:
    """What ``happened`` gives once it is true; fails when the process ends before."""
    deadline = time.monotonic() + SECONDS
    while not (result := happened()):
        assert process.poll() is None, f"the run ended before {what}"
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)
    return result


def events(folder: Path) -> list[dict[str, Any]]:
    """The lines of ``events.jsonl`` so far; the last one may be under way."""
    path = folder / "events.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
