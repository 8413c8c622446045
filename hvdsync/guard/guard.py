"""``Guard``: what is done when gradients are not finite, or replicas differ; the same on all ranks.

What ranks found in their gradients, and how state is listed and spread, comes in from elsewhere.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import numpy as np

from hvdsync.comm import verbs, world
from hvdsync.errors import NonFiniteGradient
from hvdsync.guard import nonfinite, replicas
from hvdsync.guard.fingerprints import Entry, without

logger = logging.getLogger(__name__)


# A run that skips, or only warns, may do so at every step from some point on.
_TOLD_ALWAYS = 10
_TOLD_EVERY = 100
_MOST_BATCHES = 64


class StepCount:
    """Counts steps since the ranks met: alike on all of them, also where new ones have joined."""

    def __init__(self) -> None:
        self._world = 0
        self._steps = 0

    def next(self) -> int:
        """The number of one step more, from 1."""
        if self._world != world.generation():
            self._world, self._steps = world.generation(), 0
        self._steps += 1
        return self._steps


class Guard:
    """Judges gradients before each update and compares replicas while they train.

    Arguments:
        every: compare replicas at every so many calls of :meth:`check`; a comparison costs about
            as much as reading model and optimizer state once. Where each rank takes steps alone
            (``update=``), they are compared when they meet next, as far as they are equal then.
        on_nonfinite: what happens when a gradient is NaN or infinite on any rank, or their sum
            over ranks is. Every rank comes to the same verdict, before the update. ``"raise"``
            raises ``NonFiniteGradient``, which names the ranks, the step, the first bad tensor,
            how much of it is bad, and whether the input was. ``"skip"`` leaves the step out and
            counts it in :attr:`skipped`: weights and optimizer state stay as they are. ``"warn"``
            makes the update all the same. With the last two rank 0 logs a warning.
        on_divergence: ``"raise"`` raises ``ReplicaMismatch`` on every rank. ``"repair"`` gives
            every rank the model and optimizer state of the lowest rank of the majority, and rank
            0 logs a warning that names tensor and ranks.
        ignore: shell patterns of names that are not compared, such as ``"*running_*"``.

    Gradients are judged for optimizers that were distributed with this guard; a step that a scaler
    of mixed precision leaves out is not judged. Attributes: ``skipped`` counts steps left out,
    ``repairs`` repairs; ``steps_before`` is added to the steps that are counted here (set it
    to the steps of the run that this one resumes); ``failure`` is the last ``NonFiniteGradient``.

    Raises ``ValueError`` for other values.
    """

    def __init__(
        self,
        every: int = 100,
        on_nonfinite: Literal["raise", "skip", "warn"] = "raise",
        on_divergence: Literal["raise", "repair"] = "raise",
        *,
        ignore: Sequence[str] = (),
    ) -> None:
        if every < 1:
            raise ValueError(f"Guard: every is {every}, expected a number of steps from 1 up")
        if on_nonfinite not in ("raise", "skip", "warn"):
            raise ValueError(
                f"Guard: on_nonfinite is {on_nonfinite!r}, expected 'raise', 'skip' or 'warn'"
            )
        if on_divergence not in ("raise", "repair"):
            raise ValueError(
                f"Guard: on_divergence is {on_divergence!r}, expected 'raise' or 'repair'"
            )
        self.every = every
        self.on_nonfinite = on_nonfinite
        self.on_divergence = on_divergence
        self.ignore = ignore
        self.repairs = 0
        self.skipped = 0
        self.steps_before = 0
        self.failure: NonFiniteGradient | None = None
        self._nonfinite = 0
        # TensorFlow makes its own error of what a graph raises: a callback raises this one then.
        self._raises_later = False
        self._pending: NonFiniteGradient | None = None
        self._calls = StepCount()
        self._comparison_is_due = False
        self._batches: deque[Any] = deque(maxlen=_MOST_BATCHES)
        self._losses: deque[Any] = deque(maxlen=_MOST_BATCHES)

    def watch(self, *batch: Any, loss: Any = None) -> None:
        """Show what the next step is computed from, on this rank; nothing travels.

        A report then says whether ``batch`` (arrays or tensors, nested as they are) was NaN or
        infinite already; it is looked at for no other purpose. A ``loss`` that is not finite
        counts as a gradient that is not, also where its gradient happens to be finite. To be called
        before the gradients are computed.
        """
        if batch:
            self._batches.append(batch)
        if loss is not None:
            self._losses.append(loss)

    def _judge_and_keep(
        self, rows: np.ndarray, tensors: Sequence[nonfinite.Watched], step: int
    ) -> bool:
        """As :meth:`_judge`; the error is kept for :meth:`_raise_pending` if that is called."""
        return self._keep(lambda: self._judge(rows, tensors, step))

    def _judge_meeting_and_keep(
        self, rows: np.ndarray, tensors: Sequence[nonfinite.Watched], step: int
    ) -> bool:
        """As :meth:`_judge_meeting`; the error is kept for :meth:`_raise_pending` likewise."""

        def judge() -> bool:
            self._judge_meeting(rows, tensors, step)
            return True

        return self._keep(judge)

    def _keep(self, judge: Callable[[], bool]) -> bool:
        try:
            return judge()
        except NonFiniteGradient as error:
            if not self._raises_later or self._pending is not None:
                raise
            self._pending = error
            return False

    def _raise_pending(self) -> None:
        error, self._pending = self._pending, None
        if error is not None:
            self._raises_later = False
            raise error

    def _forget(self) -> None:
        """What was shown belongs to a step that is over."""
        self._batches.clear()
        self._losses.clear()

    def _judge(self, rows: np.ndarray, tensors: Sequence[nonfinite.Watched], step: int) -> bool:
        """Whether the update is to be made, from all ranks' rows; alike on all of them.

        With the row of this rank only, in a step that it takes alone, it decides for itself. See
        :func:`hvdsync.guard.nonfinite.report`. Raises :class:`NonFiniteGradient`.
        """
        report = nonfinite.report(rows, tensors)
        if report is None:
            return True
        alone = len(rows) == 1 and verbs.size() > 1
        text = f"step {step}: {report.text}"
        if self.on_nonfinite == "raise":
            self._raise(
                f"{text}. {'This rank did not make' if alone else 'No rank made'} the update. "
                f'{report.advice}; Guard(on_nonfinite="skip") leaves such steps out'
            )
        self._nonfinite += 1
        outcome = "the update is made all the same"
        if self.on_nonfinite == "skip":
            self.skipped += 1
            who = "this rank" if alone else "all ranks"
            outcome = f"the step is left out on {who}, {self.skipped:,} so far"
        often = self._nonfinite > _TOLD_ALWAYS and self._nonfinite % _TOLD_EVERY
        if (alone or verbs.rank() == 0) and not often:
            logger.warning("%s; %s. %s", text, outcome, report.advice)
        return self.on_nonfinite == "warn"

    def _judge_meeting(
        self, rows: np.ndarray, tensors: Sequence[nonfinite.Watched], step: int
    ) -> None:
        """Raise :class:`NonFiniteGradient` on every rank for parameters that are not finite.

        Replicas that met with a rank's NaN would all have it; there is no step to leave out.
        """
        report = nonfinite.report(rows, tensors, "parameters")
        if report is None:
            return
        text = f"after step {step}: {report.text}"
        if self.on_nonfinite != "warn":
            self._raise(
                f"{text}. Replicas were not synchronised. {report.advice}, and go back to a "
                "checkpoint"
            )
        if verbs.rank() == 0:
            logger.warning("%s; replicas are synchronised all the same. %s", text, report.advice)

    def _raise(self, text: str) -> NoReturn:
        self.failure = NonFiniteGradient(f"rank {verbs.rank()} of {verbs.size()}: {text}")
        raise self.failure

    def _check(
        self,
        list_entries: Callable[[], Sequence[Entry]],
        spread: Callable[[int], None],
        may_differ: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Count a call; see :meth:`_compare`."""
        return self._compare(self._calls.next(), list_entries, spread, may_differ)

    def _compare(
        self,
        step: int,
        list_entries: Callable[[], Sequence[Entry]],
        spread: Callable[[int], None],
        may_differ: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Compare if this step is due for it; True when ``spread(source)`` mended replicas.

        ``spread`` raises on every rank where it cannot make them equal. While replicas
        ``may_differ``, alike on all ranks, a comparison waits until they meet.
        """
        self._comparison_is_due |= step % self.every == 0
        if not self._comparison_is_due or world.current().size == 1 or may_differ():
            return False
        self._comparison_is_due = False

        def entries() -> list[Entry]:
            return without(list_entries(), self.ignore)

        difference = replicas.compare(entries)
        if difference is None:
            return False
        if self.on_divergence == "raise":
            raise replicas.mismatch(difference)
        if verbs.rank() == 0:
            logger.warning(
                "step %d: %s; every rank is given the state of rank %d",
                step + self.steps_before,
                difference.text,
                difference.source,
            )
        spread(difference.source)
        replicas.check(entries)
        self.repairs += 1
        return True
