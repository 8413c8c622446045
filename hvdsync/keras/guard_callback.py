"""Guard inside Keras ``fit``: batches in, gradients judged and replicas compared.

Exported as ``hvd.callbacks.GuardCallback``, for both backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from hvdsync.keras._backend import backend
from hvdsync.keras._base_callback import DistributedCallback, forget_compiled
from hvdsync.keras.guard import Guard
from hvdsync.sync.keras_optimizer import sharing_of


class GuardCallback(DistributedCallback):
    """A guard during ``fit``: judges gradients before each update, and compares replicas.

    Arguments are those of :class:`Guard`, which is ``guard``. Model and optimizer are compared
    after every ``every``-th batch. Gradients are judged by this guard, which the optimizer keeps,
    unless it was distributed with one. Batches are counted as Keras tells of them: with
    ``steps_per_execution`` one for each execution. Raises ``NonFiniteGradient`` and
    ``ReplicaMismatch`` on every rank, unless steps are to be skipped or replicas repaired; the
    former at the end of the execution in which the bad update was left out.
    """

    def __init__(
        self,
        every: int = 100,
        on_nonfinite: Literal["raise", "skip", "warn"] = "raise",
        on_divergence: Literal["raise", "repair"] = "raise",
        *,
        ignore: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.guard = Guard(every, on_nonfinite, on_divergence, ignore=ignore)
        self._verdict: Any = None
        self._judging = self.guard

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        sharing = sharing_of(getattr(model, "optimizer", None))
        if sharing is None:
            return
        # Before Keras makes the function of its steps; what it has may hold another guard.
        if sharing.verdict_of_fit is None or sharing.verdict_of_fit is not self._verdict:
            self._verdict = sharing.verdict_of_fit = backend.make_verdict(self.guard)
            forget_compiled(model)
        self._judging = self.guard if sharing.verdict is None else sharing.verdict.guard

    def on_train_begin(self, logs: Any = None) -> None:
        self._judging._raises_later = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._judging._raise_pending()
        self.guard.check(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        self._judging._raises_later = False
