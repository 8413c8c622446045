"""Guard inside Keras ``fit``: batches in, replicas compared every so many of them.

Exported as ``hvd.callbacks.GuardCallback``, for both backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from hvdsync.keras._base_callback import DistributedCallback
from hvdsync.keras.guard import Guard


class GuardCallback(DistributedCallback):
    """Compares model and optimizer of all ranks after every ``every``-th batch of ``fit``.

    Arguments are those of :class:`Guard`, which is ``guard``. Batches are counted as Keras tells of
    them: with ``steps_per_execution`` one for each execution. Raises ``ReplicaMismatch`` on every
    rank when replicas differ, unless they are to be repaired.
    """

    def __init__(
        self,
        every: int = 100,
        on_divergence: Literal["raise", "repair"] = "raise",
        *,
        ignore: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.guard = Guard(every, on_divergence=on_divergence, ignore=ignore)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.guard.check(self.model)

    # Without need of the logs Keras may go on while they are computed.
    on_train_batch_end.async_safe = True  # type: ignore[attr-defined]
