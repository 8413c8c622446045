"""``python -m hvdsync.train`` on one of several hosts, which notes in files of its host's own disk.

``fetched`` has a line for each process that fetched MNIST, ``steps`` one for each step of each rank
here. PAUSE is a step at which rank 0 waits until there is a file ``go``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from hvdsync.comm.launch import detect


def note(name: str, text: object) -> None:
    with Path(name).open("a") as file:
        file.write(f"{text}\n")


def main() -> None:
    from hvdsync.data import mnist
    from hvdsync.train.cli import main
    from hvdsync.train.observer import EpochObserver

    launch = detect()
    pause = int(os.environ.get("PAUSE", -1)) if launch.rank == 0 else -1
    fetch, pass_ended = mnist._fetch, EpochObserver.pass_ended

    def fetching(*args: Any) -> None:
        note("fetched", os.getpid())
        fetch(*args)

    def noting(self: Any) -> bool:
        step = self._step + 1
        note("steps", f"{launch.rank} {step}")
        while step == pause and not Path("go").exists():
            time.sleep(0.02)
        return pass_ended(self)

    mnist._fetch = fetching
    EpochObserver.pass_ended = noting  # type: ignore[method-assign]
    main()


main()
