"""Functions of ``__main__`` that ``hvdsync.run`` starts, as a notebook or a script has them.

run_functions.py NAME [OPTION=VALUE ...]: prints what came back, one rank a line.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import hvdsync
from hvdsync.errors import RunFailed

FOLDER = Path.cwd()  # what a function refers to travels with it


def add(offset):
    import torch

    import hvdsync.torch as hvd

    hvd.init()
    print(f"rank {hvd.rank()} is here", flush=True)
    total = hvd.allreduce(torch.tensor(float(offset + hvd.rank())), op=hvd.Sum)
    return hvd.rank(), hvd.size(), total.item(), os.environ.get("HVDSYNC_TEST_WORD")


def fail(offset):
    import torch

    import hvdsync.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ValueError(f"nothing to add to {offset}")
    hvd.allreduce(torch.zeros(1))


def die(offset):
    import torch

    import hvdsync.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.zeros(1))


def wait(offset):
    """Until it is told to end; leaves its process's id in a file, and another at its end."""
    from hvdsync.comm.launch import detect

    rank = detect().rank

    def end(number, frame):
        (FOLDER / f"ended-{rank}").touch()
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    unfinished = FOLDER / f"{rank}.part"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(FOLDER / f"started-{rank}")
    while True:
        time.sleep(0.05)


if __name__ == "__main__":
    name, *given = sys.argv[1:]
    options = dict(option.split("=") for option in given)
    options = {k: int(v) if v.isdigit() else v for k, v in options.items()}
    try:
        came = hvdsync.run(
            globals()[name], (10,), env={"HVDSYNC_TEST_WORD": "two words"}, **options
        )
    except RunFailed as error:
        print(f"failed: rank {error.rank}, cause {error.__cause__!r}\n{error}")
    except KeyboardInterrupt:
        print("interrupted")
    else:
        for result in came:
            print(f"came: {result}")
