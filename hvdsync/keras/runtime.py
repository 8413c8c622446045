"""Starting and stopping Horovod for Keras on either backend."""

from __future__ import annotations

from typing import Any

from hvdsync.comm import horovod as _horovod
from hvdsync.keras._backend import backend


def init(*args: Any, **kwargs: Any) -> None:
    """Start Horovod for Keras's backend; arguments are those of Horovod's ``init`` (``comm``,
    ``process_sets``). With no launcher it starts a world of one.

    Raises ``LaunchError`` when the launcher started more ranks than Horovod sees.
    """
    _horovod.start(backend.FRAMEWORK, *args, **kwargs)


def shutdown() -> None:
    """Stop Horovod; afterwards this process is a world of one until the next ``init``."""
    _horovod.stop(backend.FRAMEWORK)
