"""Starting and stopping Horovod for TensorFlow."""

from __future__ import annotations

from typing import Any

from hvdsync.comm import horovod as _horovod
from hvdsync.comm import verbs, world
from hvdsync.guard.watch import watch

hvd = _horovod.load("tensorflow")


def init(*args: Any, wait_limit: float | None = None, **kwargs: Any) -> None:
    """Start Horovod for TensorFlow; other arguments are those of Horovod's ``init``
    (``comm``, ``process_sets``). With no launcher it starts a world of one.

    No collective waits longer than ``wait_limit`` seconds for a rank: every rank then logs which
    tensors wait for whom, and where each rank is, and ends. The limit of rank 0 counts; it
    defaults to the variable HVDSYNC_WAIT_LIMIT, then to 600; 0 is none.

    Raises ``LaunchError`` when the launcher started more ranks than Horovod sees.
    """
    watch.start("tensorflow", *args, wait_limit=wait_limit, **kwargs)


def shutdown() -> None:
    """Stop Horovod; afterwards this process is a world of one until the next ``init``."""
    watch.stop("tensorflow")


def is_homogeneous() -> bool:
    """Whether all hosts run equally many ranks; True before ``init``."""
    return hvd.is_homogeneous() if world.is_active() else verbs.size() == 1
