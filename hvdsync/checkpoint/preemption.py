"""Ending early without losing work: a signal on any rank in, one verdict at one step on all out.

Handlers are there from ``install`` (or ``with``) to ``remove``; nothing happens at import.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from hvdsync.comm import verbs
from hvdsync.comm.recurring import RecurringVerdict
from hvdsync.errors import HvdsyncError

logger = logging.getLogger(__name__)


class Preemption:
    """Lets a scheduler end a run: the first signal asks for it, the second ends the process.

    ```python
    with hvd.Preemption() as preemption:
        for step, batch in enumerate(batches):
            train(batch)
            if preemption.requested():
                checkpoint.save(step + 1, model=model, optimizer=optimizer)
                preemption.exit()
    ```

    A signal may reach one rank or all; it only marks a wish, and the handler that was there before
    is called too, if it is a function. :meth:`requested` makes the wish of one rank the verdict of
    all, at the same step. From the first signal on, the next one has the system's own action: the
    process ends at once, even inside a collective that does not return.

    Arguments:
        signals: what asks for the end.
        exit_code: the code of :meth:`exit`.
        every: steps from one exchange between ranks to the next. None, the default, exchanges
            about four times a second, and at each step where steps take longer than that; the
            ranks agree on it.
    """

    def __init__(
        self,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        exit_code: int = 0,
        *,
        every: int | None = None,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"Preemption: every is {every}; expected None, or 1 or more steps")
        self.signals = tuple(signals)
        self.exit_code = exit_code
        self.every = every
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()
        self._wish: str | None = None
        self._reasons: list[str] = []
        self._verdict = RecurringVerdict("hvdsync.preemption", every)

    def install(self) -> Preemption:
        """Start to listen. Raises :class:`HvdsyncError` outside the main thread.

        Nothing travels.
        """
        if threading.current_thread() is not threading.main_thread():
            raise HvdsyncError(
                "Preemption: Python lets only the main thread handle signals; call install(), or "
                "enter the with statement, there"
            )
        self._process = os.getpid()
        for number in self.signals:
            if number not in self._previous:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def remove(self) -> None:
        """Put back the handlers that were there, where they are still this object's."""
        while self._previous:
            number, before = self._previous.popitem()
            theirs = signal.getsignal(number)
            if theirs == self._on_signal or (self._wish and theirs == signal.SIG_DFL):
                signal.signal(number, signal.SIG_DFL if before is None else before)

    def __enter__(self) -> Preemption:
        return self.install()

    def __exit__(self, *error: object) -> None:
        self.remove()

    @property
    def wish(self) -> str | None:
        """Why this rank wants to end ("SIGTERM", ...), or None; the others may not know yet."""
        return self._wish

    @property
    def reason(self) -> str:
        """After the verdict: which ranks wanted it and why; the same text on all ranks."""
        return ", ".join(self._reasons)

    def request(self, reason: str) -> None:
        """Wish for the end on this rank, as a signal would; :meth:`requested` tells the others."""
        if self._wish is None:
            self._wish = reason

    def requested(self) -> bool:
        """Whether all ranks are to save and end now; once it is True it stays so.

        Collective: every rank calls it equally often, usually once after each step. Most calls
        only count; one exchange, at the intervals that ``every`` says, is an all-reduce of 16
        bytes. When the verdict falls, the reasons are gathered and rank 0 logs them.
        """
        if self._reasons:
            return True
        if not self._verdict.ask(self._wish is not None):
            return False
        wishes = verbs.allgather_object(self._wish, "hvdsync.preemption.reasons")
        by_reason: dict[str, list[str]] = {}
        for rank, wish in enumerate(wishes):
            if wish is not None:
                by_reason.setdefault(wish, []).append(str(rank))
        self._reasons = [f"{wish} on rank {', '.join(ranks)}" for wish, ranks in by_reason.items()]
        if verbs.rank() == 0:
            logger.info("%s: all ranks end at this step", self.reason)
        return True

    def exit(self) -> NoReturn:
        """End the process with ``exit_code``, by ``SystemExit``: open contexts are left first."""
        sys.exit(self.exit_code)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        for listened in self._previous:
            signal.signal(listened, signal.SIG_DFL)
        if os.getpid() != self._process:
            # A worker forked from this process, and no rank: whoever ends it waits for its end.
            os.kill(os.getpid(), number)
            return
        self.request(signal.Signals(number).name)
        before = self._previous.get(number)
        # Python's own handler of SIGINT is its default action, not somebody's wish to be told.
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
