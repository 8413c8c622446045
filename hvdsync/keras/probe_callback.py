"""Corruption probe inside Keras ``fit``: a micro-batch in, an error where a rank is wrong out.

Exported as ``hvd.callbacks.CorruptionProbeCallback``, for both backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from hvdsync.keras._base_callback import DistributedCallback
from hvdsync.keras.probe import CorruptionProbe


class CorruptionProbeCallback(DistributedCallback):
    """Probes after every ``every``-th batch of ``fit``; see :class:`CorruptionProbe`.

    Arguments are those of :class:`CorruptionProbe`, which is ``probe``, and ``batch``: the
    micro-batch of this rank that is probed with, as ``loss`` takes it. By default that is a pair of
    inputs and targets, and the loss the one that the model is compiled with.
    """

    def __init__(
        self,
        batch: Any,
        loss: Callable[[Any, Any], Any] | None = None,
        every: int = 1000,
        *,
        tolerance: float = 1e-4,
        on_corruption: Literal["raise", "warn"] = "raise",
    ) -> None:
        super().__init__()
        self.batch = batch
        self.probe = CorruptionProbe(
            _compiled_loss if loss is None else loss,
            every,
            tolerance=tolerance,
            on_corruption=on_corruption,
        )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.probe.check(self.model, self.batch)


def _compiled_loss(model: Any, batch: Any) -> Any:
    inputs, targets = batch
    return model.compute_loss(inputs, targets, model(inputs, training=True))
