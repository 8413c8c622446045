"""``python -m hvdsync.train`` with a rank that halts at a step, as the variable HALT says.

HALT is ``rank:step:how``. ``die`` is SIGKILL. ``hold`` writes the file ``halted`` and waits for
ever; ``signal`` waits there until a signal has come, ``second`` until it has come, writes
``signalled`` and waits for ever. READS names a folder where each rank notes the samples that it
trains on, known by their first pixel.
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
from hvdsync.comm.launch import detect


def main() -> None:
    from hvdsync.train.cli import main

    # A verdict at every step: the runs of these tests are short.
    preemption._VERDICT_SECONDS = 0.0
    here = detect()
    rank = 0 if here is None else here.rank
    if "HALT" in os.environ:
        halting, step, how = os.environ["HALT"].split(":")
        if rank == int(halting):
            halt_at(int(step), how)
    if "READS" in os.environ:
        note_reads(Path(os.environ["READS"], f"rank-{rank}-of-{here.size if here else 1}"))
    main()


def halt_at(step: int, how: str) -> None:
    requested = preemption.Preemption.requested
    left = [step]

    def halting(self: preemption.Preemption) -> bool:
        left[0] -= 1
        if left[0] == 0:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            Path("halted").touch()
            while how == "hold" or self.wish is None:
                time.sleep(0.01)
            Path("signalled").touch()
            while how == "second":
                time.sleep(0.01)
        return requested(self)

    preemption.Preemption.requested = halting  # type: ignore[method-assign]


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


main()
