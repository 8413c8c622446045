"""One rank's side of the watch: what it hears of others, and what it says when it waits too long.

Messages of rank 0 and this rank's pending operations come in; a verdict and endings are kept.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from hvdsync.errors import HvdsyncError, RankFailed, StalledRank
from hvdsync.guard.watch import endings, record
from hvdsync.guard.watch.channel import Channel
from hvdsync.guard.watch.endings import Ending
from hvdsync.guard.watch.hub import state_of
from hvdsync.guard.watch.pending import Operation, Pending
from hvdsync.guard.watch.report import Report, Situation, compose
from hvdsync.guard.watch.threads import start

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_CONNECT_SECONDS = 5.0
# Operations that wait for a rank that has ended fail by themselves, if not at once.
_ENDED_SECONDS = 5.0
_SILENCE_SECONDS = 12.0
_NEWS_SECONDS = 3.0
_ALL_TOLD_SECONDS = 15.0
_NOTED_SECONDS = 2.0
_GONE_SECONDS = 5.0
_GRACE_SECONDS = 10.0


class Member:
    """This rank among those that watch one another.

    ``invitation`` is what the hub of rank 0 said of itself, None when there is no way to it: this
    rank then reports alone. ``stop_collectives`` makes those that wait fail; it may block.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        limit: float,
        pending: Pending,
        stop_collectives: Callable[[], None],
        invitation: Mapping[str, Any] | None,
    ) -> None:
        self.rank, self.size, self.limit = rank, size, limit
        self._pending = pending
        self._stop_collectives = stop_collectives
        self._invitation = invitation
        self._channel = _connect(invitation, rank) if invitation is not None else None
        self._changed = threading.Condition()
        self._endings: dict[int, Ending] = {}
        self._ended_at = 0.0
        self._gone: set[int] = set()
        self._heard_at = 0.0
        self._noted = False
        self._may_end = False
        self._verdict: Report | None = None
        self._informed = False
        self._closed = threading.Event()
        self._stopping: threading.Thread | None = None
        if self._channel is not None:
            start(self._listen, "listen")
        start(self._poll, "poll")

    def say_end(self, ending: Ending) -> None:
        """Tell the others how this rank ends; what was said first remains.

        Waits a moment for rank 0 to have heard it, since the process may end right after.
        """
        with self._changed:
            if self.rank in self._endings:
                return
            self._endings[self.rank] = ending
        if self._channel is not None and self._channel.send({"kind": "ended", **ending.as_dict()}):
            with self._changed:
                self._changed.wait_for(lambda: self._noted, _NOTED_SECONDS)

    def close(self) -> None:
        """Leave the watch. The others take it for the end of this rank if nothing else was said."""
        self._closed.set()
        if self._channel is not None:
            self._channel.close()

    def reason(self, seconds: float = _NEWS_SECONDS) -> HvdsyncError | None:
        """Why collectives fail on this rank, waiting a moment for news; None when nobody knows."""
        with self._changed:
            self._changed.wait_for(lambda: self._verdict or self._cause(), seconds)
            verdict, cause = self._verdict, self._cause()
            if verdict is not None or cause is not None:
                # Whoever knows ends by himself, and may take his time for what he has to save.
                self._informed = True
        here = f"rank {self.rank} of {self.size}"
        if verdict is not None and not verdict.failed:
            stalled = StalledRank(f"{here}: {verdict.summary}; the log above has the report")
            stalled.report = verdict.text
            return stalled
        if cause is None:
            return None
        trace = f". Its traceback:\n{cause.trace}" if cause.trace else ""
        if cause.how == "finished":
            trace = (
                ", and this rank still needs it. Let every rank make as many steps and other "
                "collectives (hvd.even_batches evens batches out)"
            )
        return RankFailed(f"{here} cannot go on: {cause.text}{trace}")

    def has_ended(self, rank: int) -> bool:
        """Whether waiting for this rank is in vain, as far as is known here."""
        return rank in self._endings or self._verdict is not None

    @property
    def is_well(self) -> bool:
        """Whether no rank is known to have ended, this one included."""
        return not self._endings

    def let_the_first_go_first(self) -> None:
        """Wait a moment until the rank that this one ends because of has gone.

        A launcher's exit code and last words are those of the rank that ends first.
        """
        with self._changed:
            cause = self._cause()
            if cause is not None:
                self._changed.wait_for(lambda: cause.rank in self._gone, _GONE_SECONDS)

    def shut_down(self) -> None:
        """Stop collectives for good; where a rank does not answer to that, end the process.

        After a verdict that has begun, and there is little left to wait for.
        """
        judged = self._verdict is not None
        stopping = self._stop()
        stopping.join(_GRACE_SECONDS if judged else self.limit or None)
        if stopping.is_alive():
            if not judged:
                logger.critical(
                    "rank %d of %d: Horovod has not shut down in %g s: a rank does not answer",
                    self.rank,
                    self.size,
                    self.limit,
                )
            _end_process()

    def _stop(self) -> threading.Thread:
        with self._changed:
            if self._stopping is None:
                self._stopping = start(self._stop_collectives, "stop")
            return self._stopping

    def _cause(self) -> Ending | None:
        others = [ending for rank, ending in self._endings.items() if rank != self.rank]
        return endings.cause(others)

    # What is heard

    def _listen(self) -> None:
        assert self._channel is not None
        while (message := self._channel.receive()) is not None:
            with self._changed:
                self._heard_at = time.monotonic()
                self._hear(message.pop("kind"), message)
                self._changed.notify_all()
        if not self._closed.is_set():
            self._note_end(Ending(0, "died"))

    def _hear(self, kind: str, message: dict[str, Any]) -> None:
        if kind == "ask":
            start(lambda: self._answer(message["round"]), "answer")
        elif kind == "ended":
            self._note_end(Ending(**message))
        elif kind == "gone":
            self._gone.add(message["rank"])
        elif kind == "noted":
            self._noted = True
        elif kind == "end":
            self._may_end = True
        elif kind == "verdict" and self._verdict is None:
            report = Report(**message)
            start(lambda: self._accept(report), "verdict")

    def _note_end(self, ending: Ending) -> None:
        with self._changed:
            if ending.rank != self.rank and ending.rank not in self._endings:
                self._endings[ending.rank] = ending
                self._ended_at = self._ended_at or time.monotonic()
                self._changed.notify_all()

    def _answer(self, round: int) -> None:
        assert self._channel is not None
        taken = self._record(self._pending.read())
        self._channel.send({"kind": "record", "round": round, "record": taken.as_dict()})

    def _record(self, operations: list[Operation]) -> record.Record:
        return record.take(self.rank, self._pending, self._is_overdue(operations), operations)

    # What waits

    def _poll(self) -> None:
        interval = min(_POLL_SECONDS, self.limit / 5) if self.limit else _POLL_SECONDS
        complained_at = 0.0
        while not self._closed.wait(interval) and self._verdict is None:
            operations = self._pending.read()
            if not self._is_overdue(operations):
                complained_at = 0.0
                continue
            now = time.monotonic()
            complained_at = complained_at or now
            sent = self._channel is not None and self._channel.send({"kind": "overdue"})
            silent = now - max(complained_at, self._heard_at) > _SILENCE_SECONDS
            if silent or not sent:
                self._judge_alone(operations)
                return

    def _is_overdue(self, operations: list[Operation]) -> bool:
        bounded = [operation.seconds for operation in operations if operation.bounded]
        if self.limit and max(bounded, default=0.0) > self.limit:
            return True
        if not self._ended_at or not operations:
            return False
        waited = min(operations[0].seconds, time.monotonic() - self._ended_at)
        return waited > _ENDED_SECONDS

    def _judge_alone(self, operations: list[Operation]) -> None:
        silent = dict.fromkeys(range(self.size), "it is heard of through rank 0 only")
        silent[0] = "it could not be reached from the beginning"
        if self._invitation is not None:
            silent[0] = state_of(self._invitation["host"], self._invitation["pid"])
        ended = [e for e in self._endings.values() if e.rank != self.rank]
        records = {self.rank: self._record(operations)}
        self._accept(compose(Situation(self.size, self.limit, records, ended, silent)))

    # What follows

    def _accept(self, report: Report) -> None:
        """Log the verdict, then make what waits fail, and end a process that does not heed it."""
        with self._changed:
            if self._verdict is not None:
                return
            self._verdict = report
            self._changed.notify_all()
        logger.critical("rank %d of %d: %s", self.rank, self.size, report.text)
        if self._channel is not None and self._channel.send({"kind": "told"}):
            with self._changed:
                self._changed.wait_for(lambda: self._may_end, _ALL_TOLD_SECONDS)
        self._stop()
        if not self._closed.wait(_GRACE_SECONDS) and not self._informed:
            _end_process()


def _connect(invitation: Mapping[str, Any], rank: int) -> Channel | None:
    for address in invitation["addresses"]:
        try:
            connected = socket.create_connection((address, invitation["port"]), _CONNECT_SECONDS)
        except OSError as error:
            logger.debug("rank %d: %s is no way to rank 0: %s", rank, address, error)
            continue
        connected.settimeout(None)
        channel = Channel(connected)
        hello = {"rank": rank, "token": invitation["token"], "pid": os.getpid()}
        if channel.send({"kind": "hello", "host": socket.gethostname(), **hello}):
            return channel
    logger.warning("rank %d cannot reach rank 0 for reports on waits, and reports alone", rank)
    return None


def _end_process() -> None:
    """End at once, whatever the main thread hangs in."""
    # Another thread may hold a stream's lock for ever.
    flushing = start(lambda: (sys.stdout.flush(), sys.stderr.flush()), "flush")  # type: ignore[arg-type, func-returns-value]
    flushing.join(1.0)
    os._exit(1)
