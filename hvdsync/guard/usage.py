"""What this process has used so far: nothing in; processor time, time without one, bytes read out.

From the kernel's own counters where there are such (Linux); a few microseconds a reading.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import psutil


class Usage:
    """A reading, or with :meth:`since` the difference of two.

    ``clock`` is seconds of real time, ``process`` and ``thread`` those that processors worked for
    the process and for the calling thread, ``delayed`` those in which the thread could have run and none was free, and
    ``read`` is bytes read from files and pipes, not from sockets.
    """

    __slots__ = ("clock", "delayed", "process", "read", "thread")

    def __init__(self) -> None:
        self.clock = time.perf_counter()
        self.process = time.process_time()
        self.read = float(_field("/proc/self/io", 1))
        schedule = _fields("/proc/thread-self/schedstat")
        # In nanoseconds: running, waiting to run.
        self.delayed = int(schedule[1]) / 1e9 if len(schedule) > 1 else 0.0
        self.thread = time.thread_time()

    @property
    def busy(self) -> float:
        """Seconds in which there was work for a processor, whether it had one or not."""
        return max(self.process, self.thread + self.delayed)

    def since(self, before: Usage) -> Usage:
        """What was used between ``before`` and this."""
        difference = Usage.none()
        for name in self.__slots__:
            setattr(difference, name, max(getattr(self, name) - getattr(before, name), 0.0))
        return difference

    @classmethod
    def none(cls) -> Usage:
        """Nothing used."""
        usage = cls.__new__(cls)
        for name in cls.__slots__:
            setattr(usage, name, 0.0)
        return usage


def children() -> dict[int, Usage]:
    """The usage of each process below this one, such as loader workers, by its number."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        usage = Usage.none()
        try:
            times = child.cpu_times()
            usage.process = times.user + times.system
            usage.read = float(child.io_counters().read_chars)
        except (psutil.Error, OSError, AttributeError):
            continue  # it has ended meanwhile, or may not be looked at
        found[child.pid] = usage
    return found


# Kept open: to open costs more than to read. What they tell is of the thread that opened them, and
# a fork begins anew.
_files: dict[tuple[str, int, int], int | None] = {}


def _fields(path: str) -> list[bytes]:
    key = (path, os.getpid(), threading.get_ident())
    try:
        if key not in _files:
            _files[key] = None
            _files[key] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        file: Any = _files[key]
        return [] if file is None else os.pread(file, 128, 0).split()
    except OSError:
        return []


def _field(path: str, index: int) -> int:
    fields = _fields(path)
    return int(fields[index]) if len(fields) > index else 0
