"""The processes of a launched command, below the shells around it.

In: a shell that the launcher started, or what it became. Out: its command, signalled or ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

POLL_SECONDS = 0.05
_SHELLS = {"sh", "bash", "dash", "ash", "ksh", "zsh", "busybox"}


def command_processes(process: psutil.Process) -> list[psutil.Process]:
    """What a shell runs, or the process itself when it is not a shell (any more).

    Some shells start a single command in their own place, others beside them.
    """
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        if process.name() not in _SHELLS:
            return [process]
        return [found for child in process.children() for found in command_processes(child)]
    return []


def end_command(process: psutil.Process, seconds: float) -> None:
    """End a shell with what it runs: SIGTERM to its command, SIGKILL to all after ``seconds``.

    The shell itself is left to end with the exit code of its command.
    """
    family = [process, *_below(process)]
    commands = command_processes(process) or [process]
    for command in commands:
        with suppress(psutil.NoSuchProcess):
            command.terminate()
    alive = _wait_for_end(commands, seconds)
    for command in alive:
        _kill(command)
    shells = [other for other in family if other not in commands and _is_shell(other)]
    for shell in _wait_for_end(shells, seconds):
        _kill(shell)


def _is_shell(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.name() in _SHELLS
    return False


def _below(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _kill(process: psutil.Process) -> None:
    for other in [*_below(process), process]:
        with suppress(psutil.NoSuchProcess):
            other.kill()


def _wait_for_end(processes: Iterable[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that are left after so many seconds. Exit codes are left to whoever started them."""
    deadline = time.monotonic() + seconds
    alive = list(processes)
    while alive := [process for process in alive if _is_alive(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    return alive


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
