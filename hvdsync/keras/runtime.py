"""Starting and stopping Horovod for Keras on either backend, and who this process is."""

from __future__ import annotations

from typing import Any

from hvdsync.comm import horovod as _horovod
from hvdsync.comm import verbs, world
from hvdsync.keras._backend import backend

hvd = backend.hvd


def init(*args: Any, **kwargs: Any) -> None:
    """Start Horovod for Keras's backend; arguments are those of Horovod's ``init`` (``comm``,
    ``process_sets``). With no launcher it starts a world of one.

    Raises ``LaunchError`` when the launcher started more ranks than Horovod sees.
    """
    _horovod.start(hvd, backend.wire_tensor, backend.wire_array, *args, **kwargs)


def shutdown() -> None:
    """Stop Horovod; afterwards this process is a world of one until the next ``init``."""
    _horovod.stop(hvd)


def cross_rank() -> int:
    """Index of this host among those that have a process of this local rank; 0 before ``init``."""
    return hvd.cross_rank() if world.is_active() else _alone(0)


def cross_size() -> int:
    """Number of hosts that have a process of this local rank; 1 before ``init``."""
    return hvd.cross_size() if world.is_active() else _alone(1)


def _alone(value: int) -> int:
    verbs.size()  # raises when a launcher started several ranks
    return value
