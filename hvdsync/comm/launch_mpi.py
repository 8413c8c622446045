"""``mpirun`` below ``horovodrun``: run it, pass signals on, and say last which rank failed and how.

In: the command line that Horovod made. Out: nothing, or an error with the run's exit code.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from types import FrameType

from hvdsync.comm.launch_failure import KEPT_LINES, RanksFailed, ending, last_words, report

# As ``mpirun --tag-output`` and ``mpiexec -l`` mark the lines of ranks.
_LINE = re.compile(r"\[(?:\d+,)?(?P<rank>\d+)\](?:<stderr>:)? ?(?P<text>.*)")
# As Open MPI names the process that ended first: by exit code, by signal.
_FIRST = re.compile(r"Process name:\s*\[.*?(?P<name>\d+)\]\s*$|process rank (?P<rank>\d+) with PID")


def run_mpirun(command: str, environ: Mapping[str, str], size: int) -> None:
    """Run the command line to its end; its stderr passes through.

    SIGTERM, SIGINT and SIGUSR1 go to ``mpirun``, which knows what to do with them. Raises
    :class:`RanksFailed` when it ends with another exit code than 0.
    """
    process: subprocess.Popen[str] | None = None
    early: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and os.isatty(0):
            return  # the terminal has sent it to mpirun too
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, pass_on)
    process = subprocess.Popen(
        ["/bin/sh", "-c", f"exec {command}"],
        env=environ,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    for missed in early:
        process.send_signal(missed)
    assert process.stderr is not None
    first, lines = _listen(process.stderr)
    code = process.wait()
    code = 128 - code if code < 0 else code
    if code == 0:
        return
    if first is None:
        raise RanksFailed(f"horovodrun: mpirun failed: {ending(code)}", code)
    failure = f"rank {first} of {size} failed first: {ending(code)}"
    raise RanksFailed(report([failure], first, last_words(lines[first])), code)


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
