"""Kills training runs at random moments for a while, and checks that nothing is lost or wrong.

Two kinds of runs take turns, in all frameworks: single processes that die at random steps and in
the midst of saves, and two ranks under a launcher, of which one, all or the launcher gets SIGKILL,
SIGTERM or SIGUSR1 at any time. Prints the counts; exits with 1 when a checkpoint that was on disk
is not gone on from, or a run does not end with the bits of an undisturbed one.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from killed_runs import make_data
from test_preemption import MPIRUN
from test_resume import HERE, command
from train_runs import (
    SECONDS,
    environment,
    events,
    launcher,
    newest,
    ranks_of,
    started,
    succeed,
    wait_for,
    weights,
)

FRAMEWORKS = ("torch", "tensorflow", "keras")
LONG = ("--epochs", "40", "--checkpoint-every", "5")
# Whom it hits, and with what; a launcher of MPI passes SIGUSR1 on and ends ranks at SIGTERM.
BLOWS = (
    ("rank", signal.SIGKILL),
    ("rank", signal.SIGTERM),
    ("rank", signal.SIGUSR1),
    ("all", signal.SIGKILL),
    ("all", signal.SIGTERM),
    ("launcher", signal.SIGKILL),
    ("launcher", signal.SIGTERM),
    ("launcher", signal.SIGUSR1),
)


class Soak:
    """The counts, and the reference that each framework's two ranks are compared with."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.blows: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._whole: dict[str, Any] = {}
        self._number = 0

    def alone(self, framework: str) -> None:
        """One process, killed a dozen times by itself."""
        folder = self._new_folder()
        seed = self.random.randrange(10**6)
        result = subprocess.run(
            [sys.executable, HERE / "killed_runs.py", framework, folder, str(seed), "12"],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode != 0:
            self.wrong.append(f"{framework} alone, seed {seed}: {result.stderr[-2000:]}")
            return
        told = json.loads(result.stdout.splitlines()[-1])
        self.counts["kills"] += told["kills"]
        self.counts["saves"] += told["saves"]
        self.blows["itself at a step SIGKILL"] += told["kills"] - told["in_saves"]
        self.blows["itself in a save SIGKILL"] += told["in_saves"]
        if told["same_weights"] and told["same_numbers"]:
            self.counts["verified resumes"] += sum(
                step is not None for step in told["resumed_from"]
            )
            self.counts["verified runs"] += 1
        else:
            self.wrong.append(f"{framework} alone, seed {seed}: other weights or numbers")
        shutil.rmtree(folder)

    def together(self, framework: str, mpi: bool) -> None:
        """Two ranks, hit until they are through."""
        folder = self._new_folder()
        make_data(folder / "data")
        start = [*(MPIRUN if mpi else launcher(2)), *command(framework, "run", *LONG)]
        saves, log = folder / "saves", folder / "run-log"
        resumes = 0
        while not any(event["event"] == "end" for event in events(log)):
            on_disk = int(saves.read_text().split()[-1]) if saves.exists() else None
            runs = len(_starts(log))
            with started(start, folder, SAVES=str(saves)) as process:
                ranks = _ranks(process)
                told = wait_for(partial(_starts, log, runs), process, "it begins")[0]
                if on_disk is not None and (told is None or told < on_disk):
                    self.counts["lost"] += 1
                    self.wrong.append(f"{folder}: step {on_disk} was saved, went on from {told}")
                resumes += told is not None
                time.sleep(self.random.uniform(0, 2))
                self._hit(process, ranks)
                process.wait(SECONDS)
                _, alive = psutil.wait_procs(ranks, timeout=SECONDS)
            if alive:
                self.wrong.append(f"{folder}: {len(alive)} ranks did not end")
        self.counts["saves"] += len(saves.read_text().split())
        whole = self._reference(framework)
        if all(
            np.array_equal(a, b)
            for a, b in zip(whole, weights(newest(folder / "run")), strict=True)
        ):
            self.counts["verified resumes"] += resumes
            self.counts["verified runs"] += 1
            shutil.rmtree(folder)
        else:
            self.wrong.append(f"{folder}: {framework} on two ranks ends with other weights")

    def _hit(self, process: subprocess.Popen[str], ranks: list[psutil.Process]) -> None:
        whom, number = self.random.choice(BLOWS)
        victims = {"all": ranks, "launcher": [psutil.Process(process.pid)]}.get(
            whom, [self.random.choice(ranks)]
        )
        try:
            for victim in victims:
                victim.send_signal(number)
        except psutil.NoSuchProcess:
            return  # through already
        self.counts["kills"] += 1
        self.blows[f"{whom} {signal.Signals(number).name}"] += 1

    def _reference(self, framework: str) -> Any:
        if framework not in self._whole:
            folder = self._new_folder()
            make_data(folder / "data")
            succeed([*launcher(2), *command(framework, "run", *LONG)], folder)
            self._whole[framework] = weights(newest(folder / "run"))
        return self._whole[framework]

    def _new_folder(self) -> Path:
        self._number += 1
        folder = self.folder / str(self._number)
        folder.mkdir()
        return folder


def _starts(log: Path, after: int = 0) -> list[int | None]:
    """Of each start but the first ones, the step that it went on from."""
    return [event["resumed_from"] for event in events(log) if event["event"] == "run"][after:]


def _ranks(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found: list[psutil.Process] = wait_for(
        lambda: len(ranks := ranks_of(process)) == 2 and ranks, process, "there are two ranks"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="hvdsync-soak-"))
    soak = Soak(folder, seed)
    mpi = shutil.which("mpirun", path=environment()["PATH"]) is not None
    began = time.monotonic()
    turn = 0
    while time.monotonic() - began < options.seconds and not soak.wrong:
        framework = FRAMEWORKS[turn // 3 % 3]
        if turn % 3 < 2:
            soak.alone(framework)
        else:
            soak.together(framework, mpi and turn // 3 % 2 == 1)
        turn += 1
        counts = ", ".join(f"{number} {name}" for name, number in soak.counts.items())
        print(f"{time.monotonic() - began:5.0f} s  {framework}: {counts}", flush=True)
    for blow, number in sorted(soak.blows.items()):
        print(f"{number:5d}  {blow}")
    print(f"{soak.counts['lost']} lost, {len(soak.wrong)} wrong")
    for text in soak.wrong:
        print(text, file=sys.stderr)
    if soak.wrong:
        print(f"what they left is in {folder}", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
