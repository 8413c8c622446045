"""What rank 0 does when a rank waits too long: asks all, decides, and tells all the same report.

A rank's complaint goes in; a question to every rank, then one verdict for all of them come out.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from hvdsync.comm.comparison import listed
from hvdsync.guard.watch.endings import Ending
from hvdsync.guard.watch.record import Record
from hvdsync.guard.watch.report import Situation, compose
from hvdsync.guard.watch.stacks import users_frame
from hvdsync.guard.watch.threads import start

logger = logging.getLogger(__name__)

# On a host with more ranks than cores a thread may get its turn seconds later.
_ANSWER_SECONDS = 8.0
_TOLD_SECONDS = 10.0
_MOST_PAUSE_SECONDS = 30.0
# A first step may take that many times the limit while a rank compiles it.
_COMPILING_LIMITS = 10


class Everyone(Protocol):
    """The ranks, as an inquiry needs them."""

    def living(self) -> list[int]:
        """Ranks that can be asked."""

    def endings(self) -> list[Ending]:
        """How the others ended."""

    def send_all(self, message: dict[str, object]) -> None:
        """Send to all that can be reached."""

    def state_of(self, rank: int) -> str:
        """What is known of a rank that does not answer."""


class Inquiry:
    """One question at a time to all ranks; further complaints meanwhile change nothing."""

    def __init__(self, size: int, limit: float, everyone: Everyone) -> None:
        self._size = size
        self._limit = limit
        self._everyone = everyone
        self._changed = threading.Condition()
        self._busy = False
        self._round = 0
        self._records: dict[int, Record] = {}
        self._told: set[int] = set()
        self._warned = False

    def begin(self) -> None:
        """Ask all ranks, in a thread of its own, unless that is under way or done."""
        with self._changed:
            if self._busy:
                return
            self._busy = True
        start(self._run, "inquiry")

    def answer(self, round: int, record: Record) -> None:
        """A rank's record, in answer to a question."""
        with self._changed:
            if round == self._round:
                self._records[record.rank] = record
                self._changed.notify_all()

    def told(self, rank: int) -> None:
        """A rank has given the report to its log."""
        with self._changed:
            self._told.add(rank)
            self._changed.notify_all()

    def _run(self) -> None:
        situation = self._ask()
        if not any(record.overdue for record in situation.records.values()):
            self._busy = False  # it came in the meantime
            return
        if self._is_compiling(situation):
            with self._changed:
                self._changed.wait_for(lambda: False, min(self._limit, _MOST_PAUSE_SECONDS))
            self._busy = False
            return
        report = compose(situation)
        self._everyone.send_all(
            {
                "kind": "verdict",
                "failed": report.failed,
                "summary": report.summary,
                "text": report.text,
            }
        )
        # The first rank that ends makes a launcher end the others: all give the report before.
        with self._changed:
            self._changed.wait_for(lambda: situation.records.keys() <= self._told, _TOLD_SECONDS)
        self._everyone.send_all({"kind": "end"})

    def _ask(self) -> Situation:
        with self._changed:
            self._round += 1
            self._records.clear()
        living = set(self._everyone.living())
        self._everyone.send_all({"kind": "ask", "round": self._round})
        with self._changed:
            self._changed.wait_for(lambda: living <= self._records.keys(), _ANSWER_SECONDS)
            records = dict(self._records)
        ended = self._everyone.endings()
        silent = set(range(self._size)) - records.keys() - {e.rank for e in ended}
        return Situation(
            self._size,
            self._limit,
            records,
            ended,
            {rank: self._everyone.state_of(rank) for rank in silent},
        )

    def _is_compiling(self, situation: Situation) -> bool:
        """Whether the ranks that are waited for compile, and may take longer."""
        absent = situation.absent()
        records = [situation.records.get(rank) for rank in absent]
        longest = max((seconds for _, seconds, *_ in situation.waiting()), default=0.0)
        if situation.endings or longest > _COMPILING_LIMITS * self._limit:
            return False
        if not records or not all(record is not None and record.compiling for record in records):
            return False
        if not self._warned:
            self._warned = True
            frame = users_frame(records[0].stack)  # type: ignore[union-attr]
            logger.warning(
                "%s imports, traces or compiles at %s, and others have waited %.0f s for it "
                "(limit %g s); they go on to wait, up to %g s",
                listed(absent),
                frame.place if frame else "an unknown place",
                longest,
                self._limit,
                _COMPILING_LIMITS * self._limit,
            )
        return True
