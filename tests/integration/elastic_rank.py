"""``python -m hvdsync.train`` in an elastic world, with ranks that die or wait at a step.

DIE is ``rank:step,...``, of the ranks as they are at the start: SIGKILL once that step is over,
before it is committed. WAIT is a step after which rank 0 waits until it has heard of new hosts.
NOTES names a folder where each process notes, step by step, the samples that it has trained on,
known by their first pixel.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdsync.comm.launch import detect


def main() -> None:
    import horovod.common.elastic as elastic

    from hvdsync.comm import verbs
    from hvdsync.train.cli import main
    from hvdsync.train.feed import Batch, Epoch
    from hvdsync.train.observer import EpochObserver

    here = detect()
    # A process that replaces another has its rank, and is not to die of the same.
    first = not list(Path(os.environ["NOTES"]).glob(f"*-as-{here.rank}"))
    notes = Path(os.environ["NOTES"], f"{os.getpid()}-as-{here.rank}")
    notes.touch()
    deaths = dict(pair.split(":") for pair in os.environ.get("DIE", "").split(",") if pair)
    dies_at = int(deaths.get(str(here.rank), -1)) if first else -1
    waits_at = int(os.environ.get("WAIT", -1)) if here.rank == 0 and first else -1
    heard = threading.Event()
    read: deque[list[int]] = deque()
    batches, pass_ended = Epoch.__iter__, EpochObserver.pass_ended
    on_hosts_updated = elastic.State.on_hosts_updated

    def reading(self: Any) -> Iterator[Batch]:
        read.clear()
        for batch in batches(self):
            pixels = batch.images[batch.weights > 0, 0, 0, 0] * 1000
            read.append(pixels.round().astype(int).tolist())
            yield batch

    def noting(self: Any) -> bool:
        step = self._step + 1
        values = [time.time(), verbs.size(), self._epoch.number, step, read.popleft()]
        with notes.open("a") as file:
            file.write(json.dumps(values) + "\n")
        if step == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == waits_at:
            Path("waiting").touch()
            heard.wait()
        return pass_ended(self)

    def hearing(self: Any, timestamp: Any, update: Any) -> None:
        on_hosts_updated(self, timestamp, update)
        heard.set()

    Epoch.__iter__ = reading  # type: ignore[method-assign]
    EpochObserver.pass_ended = noting  # type: ignore[method-assign]
    elastic.State.on_hosts_updated = hearing
    main()


main()
