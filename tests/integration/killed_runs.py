"""One framework's training run, killed with SIGKILL again and again, against an undisturbed one.

Arguments: framework, folder, seed, number of kills. Each run is a child of this process, which
imports the framework once for all; a kill comes after a step or in the midst of a save. Prints what
happened as JSON; fails when a resumed run differs from the undisturbed one in a single bit.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hvdsync.checkpoint import store
from hvdsync.comm import threads
from hvdsync.train import cli
from hvdsync.train.observer import EpochObserver

OPTIONS = (
    *("--model", "mlp", "--device", "cpu", "--epochs", "3", "--batch-size", "8"),
    *("--dropout", "0.3", "--augment", "--optimizer", "momentum", "--lr", "0.05"),
    *("--warmup-epochs", "1.5", "--accumulate", "2", "--checkpoint-every", "2"),
)
# More steps than all kills together can get through: 203 samples are 26 passes of 8, 13 steps.
# A rate whose float32, set again after a restore, is a part of an ulp from what was asked for.
OWN, STEPS = ("--epochs", "12", "--lr", "0.045"), 156
_MOST_STEPS = 5
_MOST_TOUCHES = 14  # of some 17 that a save needs: within two saves, which are two steps apart


def make_data(path: Path) -> None:
    """A few images that can be told apart, if not at once; the first pixel is the index / 1000."""
    path.mkdir()
    rng = np.random.default_rng(5)
    patterns = rng.normal(size=(3, 8, 8))
    for part, count in (("train", 203), ("test", 21)):
        labels = rng.integers(3, size=count)
        images = patterns[labels] + rng.normal(size=(count, 8, 8))
        images[:, 0, 0] = np.arange(count) / 1000
        np.save(path / f"x_{part}.npy", images.astype(np.float32))
        np.save(path / f"y_{part}.npy", labels)


def run(argv: list[str], log: Path, kill: dict[str, int] | None = None) -> int:
    """A run in a child process; gives the status that it left."""
    child = os.fork()
    if child == 0:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        note_saves(log.with_name("saves"))
        if kill is not None:
            prepare_to_die(**kill)
        train(argv)
    _, status = os.waitpid(child, 0)
    return status


def train(argv: list[str]) -> NoReturn:
    code: Any = 1
    try:
        cli.main(argv)
    except SystemExit as end:
        code = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def note_saves(path: Path) -> None:
    """One byte for each checkpoint that is on disk."""
    write = store.Store.write

    def noting(self: store.Store, *args: Any, **kwargs: Any) -> Any:
        folder = write(self, *args, **kwargs)
        with path.open("a") as notes:
            notes.write(".")
        return folder

    store.Store.write = noting  # type: ignore[method-assign]


def prepare_to_die(steps: int, touches: int) -> None:
    """SIGKILL after so many steps; with ``touches``, when the disk is next touched so often."""
    left = [2 * steps, touches]
    pass_ended = EpochObserver.pass_ended

    def count_pass(self: EpochObserver) -> bool:
        left[0] -= 1
        if left[0] <= 0 and not touches:
            os.kill(os.getpid(), signal.SIGKILL)
        return pass_ended(self)

    EpochObserver.pass_ended = count_pass  # type: ignore[method-assign]

    def count_touch(function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if left[0] <= 0:
                left[1] -= 1
                if left[1] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    if touches:
        for name in ("fsync", "rename", "replace", "mkdir", "rmdir", "unlink"):
            setattr(os, name, count_touch(getattr(os, name)))


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def epochs(folder: Path) -> dict[int, list[float]]:
    """What the last run to end each epoch said of it."""
    names = ("loss", "accuracy", "test_loss", "test_accuracy")
    told = (event for event in events(folder) if event["event"] == "epoch")
    return {event["epoch"]: [event[name] for name in names] for event in told}


def main(framework: str, folder: Path, seed: int, kills: int) -> None:
    # Once, before any child; each then finds it imported.
    threads.cap(os.environ, 1)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for module in (f"{framework}_worker", "loop", "events", "progress", "keeper"):
        importlib.import_module(f"hvdsync.train.{module}")
    importlib.import_module("tensorboardX")
    from train_runs import newest, weights

    data = folder / "data"
    make_data(data)
    shared = ["--framework", framework, "--dataset", str(data), *OPTIONS, *OWN]
    log = folder / "log"

    def argv(name: str) -> list[str]:
        own = ["--checkpoint-dir", str(folder / name), "--log-dir", str(folder / f"{name}-log")]
        return [*shared, *own]

    def ended(status: int, expected: int) -> None:
        assert status == expected, f"status {status}\n{log.read_text()[-4000:]}"

    ended(run(argv("whole"), log), 0)
    rng = random.Random(seed)
    in_saves = 0
    assert kills * (_MOST_STEPS + 2) < STEPS, "the run would be over before the last kill"
    for i in range(kills):
        # Every other kill within a save.
        kill = {
            "steps": rng.randint(1, _MOST_STEPS),
            "touches": rng.randint(1, _MOST_TOUCHES) if i % 2 else 0,
        }
        ended(run(argv("killed"), log, kill), signal.SIGKILL)
        in_saves += kill["touches"] > 0
    ended(run(argv("killed"), log), 0)

    resumed = [e["resumed_from"] for e in events(folder / "killed-log") if e["event"] == "run"]
    whole, killed = (folder / name for name in ("whole", "killed"))
    pairs = zip(weights(newest(whole)), weights(newest(killed)), strict=True)
    print(
        json.dumps(
            {
                "kills": len(resumed) - 1,
                "in_saves": in_saves,
                "saves": (folder / "saves").stat().st_size,
                "resumed_from": resumed,
                "step": newest(killed).name,
                "same_weights": all(np.array_equal(a, b) for a, b in pairs),
                "same_numbers": epochs(folder / "whole-log") == epochs(folder / "killed-log"),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
