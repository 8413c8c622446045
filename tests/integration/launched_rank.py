"""A rank of the launcher's tests: ends, or waits, in the way that it is told."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

rank = int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def stay():
    """Longer than any test waits."""
    time.sleep(1000)


def fail(error):
    if rank == 1:
        raise error
    stay()


def leave_a_child():
    if rank == 1:
        # It holds this rank's stderr open.
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        sys.exit(4)
    stay()


def end_by(number):
    if rank == 1:
        os.kill(os.getpid(), number)
    stay()


def miss_the_other(framework):
    """Rank 1 fails while rank 0 waits for it in a collective."""
    if framework == "torch":
        import torch

        import hvdsync.torch as hvd

        tensor = torch.ones(2)
    else:
        import tensorflow as tf

        import hvdsync.tensorflow as hvd

        tensor = tf.ones(2)
    hvd.init()
    hvd.allreduce(tensor, name="both")
    if rank == 1:
        raise KeyError("the cause")
    hvd.allreduce(tensor, name="alone")


def save(seconds):
    """End well after a SIGTERM, which is noted, when so much time has passed."""
    told = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    Path(f"ready-{rank}").touch()
    while not told:
        time.sleep(0.01)
    time.sleep(seconds)
    Path(f"saved-{rank}").touch()


def note_user_signal():
    told = []
    signal.signal(signal.SIGUSR1, lambda number, frame: told.append(number))
    Path(f"ready-{rank}").touch()
    while not told:
        time.sleep(0.01)


WAYS = {
    "end well": lambda: None,
    "raise": lambda: fail(ValueError("of rank 1")),
    "exit": lambda: fail(SystemExit(3)),
    "kill": lambda: end_by(signal.SIGKILL),
    "segfault": lambda: end_by(signal.SIGSEGV),
    "leave a child": leave_a_child,
    "torch": lambda: miss_the_other("torch"),
    "tensorflow": lambda: miss_the_other("tensorflow"),
    "save": lambda: save(0),
    "save slowly": lambda: save(6),
    "save never": lambda: save(1000),
    "note": note_user_signal,
}
WAYS[sys.argv[1]]()
