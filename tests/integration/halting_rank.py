"""``python -m hvdsync.train`` with a rank that halts at a step, as the variable HALT says.

HALT is ``rank:step:how``. ``die`` is SIGKILL. ``hold`` writes the file ``halted`` and waits for
ever; ``signal`` waits there until a signal has come, ``second`` until it has come, writes
``signalled`` and waits for ever. READS names a folder where each rank notes the samples that it
trains on, known by their first pixel, SAVES a file for the steps of checkpoints that are on disk.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdsync.checkpoint import preemption
from hvdsync.comm import recurring
from hvdsync.comm.launch import detect


def main() -> None:
    from hvdsync.train.cli import main

    # A verdict at every step: the runs of these tests are short.
    recurring._SECONDS = 0.0
    here = detect()
    rank = 0 if here is None else here.rank
    if "HALT" in os.environ:
        halting, step, how = os.environ["HALT"].split(":")
        if rank == int(halting):
            halt_at(int(step), how)
    if "READS" in os.environ:
        note_reads(Path(os.environ["READS"], f"rank-{rank}-of-{here.size if here else 1}"))
    if "SAVES" in os.environ:
        note_saves(Path(os.environ["SAVES"]))
    main()


def halt_at(step: int, how: str) -> None:
    from hvdsync.train.observer import EpochObserver

    listening: list[Any] = []
    install, pass_ended = preemption.Preemption.install, EpochObserver.pass_ended
    left = [step]

    def remembered(self: Any) -> Any:
        listening.append(self)
        return install(self)

    def halting(self: Any) -> bool:
        left[0] -= (self._passes + 1) % self._epoch.accumulate == 0
        if left[0] == 0:
            left[0] = -1
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            Path("halted").touch()
            while how == "hold" or listening[0].wish is None:
                time.sleep(0.01)
            Path("signalled").touch()
            while how == "second":
                time.sleep(0.01)
        return pass_ended(self)

    preemption.Preemption.install = remembered  # type: ignore[method-assign]
    EpochObserver.pass_ended = halting  # type: ignore[method-assign]


def note_reads(path: Path) -> None:
    from hvdsync.train.feed import Batch, Epoch

    batches = Epoch.__iter__

    def noting(self: Any) -> Iterator[Batch]:
        with path.open("a") as notes:
            for batch in batches(self):
                pixels = batch.images[batch.weights > 0, 0, 0, 0] * 1000
                notes.write(json.dumps([self.number, pixels.round().astype(int).tolist()]) + "\n")
                yield batch

    Epoch.__iter__ = noting  # type: ignore[method-assign]


def note_saves(path: Path) -> None:
    from hvdsync.checkpoint.store import Store

    write = Store.write

    def noting(self: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        folder = write(self, step, *args, **kwargs)
        with path.open("a") as notes:
            notes.write(f"{step}\n")
        return folder

    Store.write = noting  # type: ignore[method-assign]


main()
