"""``mpirun`` below ``horovodrun``: run it, pass signals on, and say last which rank failed and how.

In: the command line that Horovod made. Out: nothing, or an error with the run's exit code.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import FrameType

import psutil

from hvdsync.comm.launch_failure import KEPT_LINES, RanksFailed, ending, last_words, report
from hvdsync.comm.launch_processes import command_processes

# As ``mpirun --tag-output`` and ``mpiexec -l`` mark the lines of ranks.
_LINE = re.compile(r"\[(?:\d+,)?(?P<rank>\d+)\](?:<stderr>:)? ?(?P<text>.*)")
# As Open MPI names the process that ended first: by exit code, by signal.
_FIRST = re.compile(r"Process name:\s*\[.*?(?P<name>\d+)\]\s*$|process rank (?P<rank>\d+) with PID")


_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
_PR_SET_PDEATHSIG = 1


def run_mpirun(command: str, environ: Mapping[str, str], size: int) -> None:
    """Run the command line to its end; its stderr passes through.

    The first SIGTERM or SIGINT reaches the ranks of this host as SIGTERM, so that they may save and
    end well; ``mpirun`` itself, which would give them a second, gets the next one, and any SIGUSR1,
    which it passes on. Raises :class:`RanksFailed` when it ends with another exit code than 0.
    """
    process: subprocess.Popen[str] | None = None
    early: list[int] = []
    asked = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if process is None:
            early.append(number)
            return
        if number == signal.SIGINT and os.isatty(0):
            return  # the terminal has sent it to mpirun too
        ranks = [] if asked or number == signal.SIGUSR1 else _local_ranks(process.pid)
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):
                rank.terminate()
        if not ranks:
            process.send_signal(number)
        asked = asked or number != signal.SIGUSR1

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    process = subprocess.Popen(
        ["/bin/sh", "-c", f"exec {command}"],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=_end_with_parent,
    )
    for missed in early:
        process.send_signal(missed)
    assert process.stderr is not None
    first, lines = _listen(process.stderr)
    code = process.wait()
    code = 128 - code if code < 0 else code
    if code == 0:
        return
    words = ending(code, asked=asked)
    if first is None:
        raise RanksFailed(f"horovodrun: mpirun failed: {words}", code)
    failure = f"rank {first} of {size} failed first: {words}"
    raise RanksFailed(report([failure], first, last_words(lines[first])), code)


def _end_with_parent() -> None:
    """Have the system end this process when ``horovodrun`` is killed; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _local_ranks(mpirun: int) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(mpirun).children():
            with suppress(psutil.Error):
                # mpirun's own helpers, such as the connections to other hosts, have no rank.
                if any(name in child.environ() for name in _RANK_VARIABLES):
                    found += command_processes(child)
    return found


def _listen(stderr: Iterable[str]) -> tuple[int | None, Mapping[int, list[str]]]:
    """The rank that mpirun says has ended first, and the last lines of each rank."""
    kept: defaultdict[int, deque[str]] = defaultdict(lambda: deque(maxlen=KEPT_LINES))
    first = None
    for line in stderr:
        sys.stderr.write(line)
        sys.stderr.flush()
        if match := _LINE.match(line):
            kept[int(match["rank"])].append(match["text"])
        elif first is None and (match := _FIRST.search(line)):
            first = int(match["name"] or match["rank"])
    return first, defaultdict(list, {rank: list(lines) for rank, lines in kept.items()})
