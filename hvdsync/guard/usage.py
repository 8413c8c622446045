"""What this process has used so far: nothing in; processor time, time without one, bytes read out.

From the kernel's own counters where there are such (Linux); a few microseconds a reading. Threads
of the runtime that carries collectives are left out: what they do is communication.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

import psutil

from hvdsync.comm import runtime_threads

# A thread that runs for less than this share of the time in which it waits to hardly does anything:
# where processors are crowded, one that wakes for a moment waits longer than it works.
_WORKS = 0.2


@dataclass
class Usage:
    """What was used since some moment.

    ``process`` and ``thread`` are seconds that processors worked for the process and for the thread
    that asks, ``delayed`` those in which that thread could have run and none was free, and ``read``
    is bytes read from files and pipes, not from sockets.
    """

    process: float = 0.0
    thread: float = 0.0
    delayed: float = 0.0
    read: float = 0.0

    @property
    def wanted(self) -> float:
        """Processor seconds that the thread had or wanted."""
        return demand(self.thread, self.delayed)

    def add_between(self, before: Usage, after: Usage) -> None:
        """Add what was used from one reading to the other."""
        self.process += max(after.process - before.process, 0.0)
        self.thread += max(after.thread - before.thread, 0.0)
        self.delayed += max(after.delayed - before.delayed, 0.0)
        self.read += max(after.read - before.read, 0.0)


def demand(running: float, waiting: float) -> float:
    """Processor seconds that a thread had or wanted: running, and waiting to run."""
    return running + waiting if running > _WORKS * waiting else running


def reading() -> Usage:
    """What this process and the calling thread have used so far."""
    schedule = _fields("/proc/thread-self/schedstat")  # nanoseconds: running, waiting to run
    read = _fields("/proc/self/io")
    return Usage(
        processor_seconds(),
        time.thread_time(),
        int(schedule[1]) / 1e9 if len(schedule) > 1 else 0.0,
        float(read[1]) if len(read) > 1 else 0.0,
    )


def processor_seconds() -> float:
    """Seconds that processors worked for this process so far."""
    carried = 0.0
    for number in runtime_threads.known():
        if schedule := _fields(f"/proc/self/task/{number}/schedstat"):
            carried += int(schedule[0]) / 1e9
    return time.process_time() - carried


def threads() -> dict[str, tuple[float, float]]:
    """Of each thread of this process: seconds running, and waiting to run."""
    found = {}
    for number in runtime_threads.running() - runtime_threads.known():
        schedule = _read(f"/proc/self/task/{number}/schedstat").split()
        if len(schedule) > 1:  # it may have ended meanwhile
            found[number] = int(schedule[0]) / 1e9, int(schedule[1]) / 1e9
    return found


def children() -> dict[int, tuple[Usage, float]]:
    """The usage of each process below this one, such as loader workers, and its age in seconds.

    Some milliseconds: the whole list of processes is looked through.
    """
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
            read = float(child.io_counters().read_chars)
            age = time.time() - child.create_time()
        except (psutil.Error, OSError, AttributeError):
            continue  # it has ended meanwhile, or may not be looked at
        found[child.pid] = Usage(process=times.user + times.system, read=read), age
    return found


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:
        return b""


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
