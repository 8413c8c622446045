"""Threads of the watch: none keeps the process alive, and stacks leave them out by their names."""

from __future__ import annotations

import threading
from collections.abc import Callable

PREFIX = "hvdsync-watch"


def start(function: Callable[[], None], name: str) -> threading.Thread:
    """A daemon thread that runs ``function``."""
    thread = threading.Thread(target=function, name=f"{PREFIX}-{name}", daemon=True)
    thread.start()
    return thread
