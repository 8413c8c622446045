"""One thread that writes while training goes on: an action in, its failure out when asked for.

Not a daemon: an interpreter that ends lets the action finish.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from hvdsync.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass
class _Outcome:
    """What the thread leaves behind until somebody asks."""

    label: str = ""
    failure: BaseException | None = None


class Background:
    """At most one action at a time; its failure waits for :meth:`finish`, or is logged at exit."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome = _Outcome()
        # Runs when this object goes, at the latest when the interpreter ends.
        weakref.finalize(self, _log_uncollected, self._outcome)

    def start(self, action: Callable[[], object], label: str) -> None:
        """Run ``action`` in the thread; :meth:`finish` must have been called before."""
        self._outcome.label = label

        def run() -> None:
            try:
                action()
            except BaseException as error:
                # Through self: an owner that is dropped meanwhile must not miss it.
                self._outcome.failure = error

        self._thread = threading.Thread(target=run, name="hvdsync-checkpoint", daemon=False)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the action under way. Raises :class:`CheckpointError` when it failed, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._outcome.failure = self._outcome.failure, None
        if failure is not None:
            raise CheckpointError(
                f"in the background: {self._outcome.label} failed: {failure}"
            ) from failure


def _log_uncollected(outcome: _Outcome) -> None:
    if outcome.failure is not None:
        logger.error(
            "in the background: %s failed, and nobody asked: %s", outcome.label, outcome.failure
        )
