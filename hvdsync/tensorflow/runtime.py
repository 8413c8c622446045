"""Starting and stopping Horovod for TensorFlow."""

from __future__ import annotations

from typing import Any

from hvdsync.comm import horovod as _horovod
from hvdsync.comm import verbs, world

hvd = _horovod.load("tensorflow")


def init(*args: Any, **kwargs: Any) -> None:
    """Start Horovod for TensorFlow; arguments are those of Horovod's ``init`` (``comm``,
    ``process_sets``). With no launcher it starts a world of one.

    Raises ``LaunchError`` when the launcher started more ranks than Horovod sees.
    """
    _horovod.start("tensorflow", *args, **kwargs)


def shutdown() -> None:
    """Stop Horovod; afterwards this process is a world of one until the next ``init``."""
    _horovod.stop("tensorflow")


def is_homogeneous() -> bool:
    """Whether all hosts run equally many ranks; True before ``init``."""
    return hvd.is_homogeneous() if world.is_active() else verbs.size() == 1
