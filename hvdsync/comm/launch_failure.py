"""What ``horovodrun`` does when ranks fail or signals come, and what it says last.

In: the output, exit codes and processes of ranks, as Horovod's launcher over Gloo sees them. Out:
signals to ranks, and an error with the exit code and the last words of the rank that failed first.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, TextIO

import psutil

from hvdsync.comm.launch_processes import POLL_SECONDS, command_processes

GRACE_VARIABLE = "HVDSYNC_GRACE_SECONDS"
#: For ranks that were told to end: a checkpoint may be large.
_GRACE_SECONDS = 600.0
#: For ranks whose neighbour has failed: time to say what they know and to end by themselves.
_LINGER_SECONDS = 5.0
#: For output that is under way when its command has failed; a child may hold the pipe for ever.
_DRAIN_SECONDS = 5.0
KEPT_LINES = 2000
_FRAME_LINES = 20
_LAST_LINES = 20
_FIRST_LINES = 5
_TRACEBACK = "Traceback (most recent call last)"
#: Errors of ranks that fail because another has.
_FOLLOWS = re.compile(
    r"HorovodInternalError|\bRankFailed\b|Horovod has been shut down|\[Op:Horovod"
    r"|Connection (closed|reset) by peer"
)


class RanksFailed(RuntimeError):
    """A run has failed; the message is what the launcher says last, ``exit_code`` what it gives."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def last_words(lines: Sequence[str]) -> list[str]:
    """The last traceback among lines of stderr with what followed, or else the last lines."""
    starts = [i for i, line in enumerate(lines) if _TRACEBACK in line]
    if not starts:
        return list(lines[-_LAST_LINES:])
    start = starts[-1]
    frames = start + 1
    while frames < len(lines) and (not lines[frames] or lines[frames][0] in " |+"):
        frames += 1
    head = list(lines[start:frames])
    if len(head) > _FRAME_LINES:
        head = [head[0], "  ...", *head[-_FRAME_LINES:]]
    words = list(lines[frames:])
    if len(words) > _LAST_LINES:
        # Errors of graphs say what it was last, after a long list of where.
        words = [*words[:_FIRST_LINES], "  ...", *words[_FIRST_LINES - _LAST_LINES :]]
    return [*head, *words]


def report(failures: Sequence[str], rank: int, words: Sequence[str]) -> str:
    """What the launcher says last: one line for each failure, and the last words of ``rank``."""
    said = f"the last lines on the stderr of rank {rank}:"
    lines = [*failures, said if words else f"rank {rank} wrote nothing to its stderr"]
    return "\n".join([*(f"horovodrun: {line}" for line in lines), *(f"  {line}" for line in words)])


def ending(exit_code: int, *, asked: bool = False) -> str:
    """An exit code in words; ``asked`` when the launcher had been told to end the ranks."""
    if exit_code - 128 not in set(signal.Signals):
        return f"exit code {exit_code}"
    name = signal.Signals(exit_code - 128).name
    unasked = name == "SIGKILL" and not asked
    hint = " (as the kernel does when memory runs out)" if unasked else ""
    return f"ended by {name}{hint}, exit code {exit_code}"


class Rank:
    """One rank as the launcher sees it; stands in for the stream that its stderr goes to."""

    def __init__(self, rank: int, host: str, stream: TextIO, changed: threading.Condition) -> None:
        self.rank = rank
        self.host = host
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.parent: int | None = None
        self.exit_code: int | None = None
        self.ended = float("inf")
        self._stream = stream
        self._changed = changed

    def write(self, text: str) -> None:
        """Pass a line on, and keep it without the launcher's prefix."""
        self.lines.append(text.split("<stderr>:", 1)[-1].rstrip("\r\n"))
        self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def command_started(self, parent: int) -> None:
        """``parent`` is the process below which this rank's command runs."""
        self.parent = parent

    def command_ended(self, exit_code: int) -> float | None:
        """Note the end; gives the seconds to wait for output, None for as long as it takes."""
        with self._changed:
            self.exit_code = 128 - exit_code if exit_code < 0 else exit_code
            self.ended = time.monotonic()
            self._changed.notify_all()
        return None if exit_code == 0 else _DRAIN_SECONDS

    @property
    def follows(self) -> bool:
        """Whether its last words are those of a rank that misses another."""
        return any(_FOLLOWS.search(line) for line in last_words(list(self.lines)))


class Ranks:
    """All ranks of one run; made by the launcher before it starts them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: dict[int, Rank] = {}
        self._changed = threading.Condition()
        self._first_failure: float | None = None
        self._terminated = float("inf")
        self._passed_on: str | None = None

    def listen(self, slot: Any, stream: TextIO | None) -> Rank:
        """The stream for the stderr of the rank that Horovod puts into ``slot``."""
        rank = Rank(slot.rank, slot.hostname, stream or sys.stderr, self._changed)
        with self._changed:
            self._ranks[slot.rank] = rank
        return rank

    def let_others_end(self) -> None:
        """After a failure: return when every rank has ended, or after some seconds."""
        with self._changed:
            if self._first_failure is None:
                self._first_failure = time.monotonic()
            left = self._first_failure + _LINGER_SECONDS - time.monotonic()
            self._changed.wait_for(self._all_ended, timeout=max(left, 0))
            if not self._all_ended():
                self._terminated = min(self._terminated, time.monotonic())

    def _all_ended(self) -> bool:
        ended = [rank for rank in self._ranks.values() if rank.exit_code is not None]
        return len(ended) == self.size

    def raise_for_failure(self) -> None:
        """Raise :class:`RanksFailed` when a rank has ended with another exit code than 0."""
        failed = sorted(
            (rank for rank in self._ranks.values() if rank.exit_code), key=lambda rank: rank.ended
        )
        if not failed:
            return
        alone = [rank for rank in failed if rank.ended <= self._terminated] or failed
        first = next((rank for rank in alone if not rank.follows), alone[0])
        failures = [
            f"rank {first.rank} of {self.size} on {first.host} failed first: {self._ending(first)}"
        ]
        failures += [
            f"rank {rank.rank} failed too: {self._ending(rank)}"
            for rank in alone
            if rank is not first
        ]
        if self._passed_on:
            failures.append(f"it had passed {self._passed_on} on to all ranks before")
        words = last_words(list(first.lines))
        raise RanksFailed(report(failures, first.rank, words), first.exit_code or 1)

    def _ending(self, rank: Rank) -> str:
        return ending(rank.exit_code or 0, asked=self._passed_on is not None)

    def forward_signals(self, end: threading.Event) -> None:
        """Pass signals to the launcher on to the ranks, and let them end by themselves.

        The first SIGTERM or SIGINT reaches each rank as SIGTERM; ``end``, on which Horovod ends
        all ranks, is set by the second one, or when ranks are still there after
        ``HVDSYNC_GRACE_SECONDS`` (600). SIGUSR1 is passed on, and nothing more.
        """
        grace = float(os.environ.get(GRACE_VARIABLE, _GRACE_SECONDS))

        def on_end(number: int, frame: FrameType | None) -> None:
            if self._passed_on:
                end.set()
                return
            self._passed_on = signal.Signals(number).name
            _in_background(lambda: self._end(end, grace))

        def on_user_signal(number: int, frame: FrameType | None) -> None:
            _in_background(lambda: self._send(signal.SIGUSR1, time.monotonic()))

        signal.signal(signal.SIGTERM, on_end)
        signal.signal(signal.SIGINT, on_end)
        if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, on_user_signal)

    def _end(self, end: threading.Event, grace: float) -> None:
        sys.stderr.write(
            f"horovodrun: {self._passed_on} is passed on to the ranks, which have {grace:g} s to "
            "end; a second signal ends them at once\n"
        )
        sys.stderr.flush()
        deadline = time.monotonic() + grace
        self._send(signal.SIGTERM, deadline)
        with self._changed:
            self._changed.wait_for(self._all_ended, timeout=deadline - time.monotonic())
        end.set()

    def _send(self, number: signal.Signals, deadline: float) -> None:
        """Send a signal once to each rank; wait until ``deadline`` for those not yet started."""
        reached: set[int] = set()
        while True:
            waiting = [
                index
                for index in range(self.size)
                if index not in reached and not self._has_ended(index)
            ]
            for index in waiting:
                processes = self._processes(index)
                for process in processes:
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(number)
                if processes:
                    reached.add(index)
            if len(reached) == self.size or not waiting or time.monotonic() > deadline:
                return
            time.sleep(POLL_SECONDS)

    def _has_ended(self, index: int) -> bool:
        return index in self._ranks and self._ranks[index].exit_code is not None

    def _processes(self, index: int) -> list[psutil.Process]:
        parent = self._ranks[index].parent if index in self._ranks else None
        if parent is None:
            return []
        try:
            below = psutil.Process(parent).children()
        except psutil.NoSuchProcess:
            return []
        return [process for child in below for process in command_processes(child)]


def _in_background(function: Callable[[], None]) -> None:
    threading.Thread(target=function, daemon=True).start()
