"""``CorruptionProbe`` for Keras on both backends: a model and a batch in, wrong ranks out."""

from __future__ import annotations

from typing import Any

from hvdsync.guard import probe
from hvdsync.guard.keras_probe import KerasModel
from hvdsync.keras._backend import backend


class CorruptionProbe(probe.CorruptionProbe):
    __doc__ = probe.CorruptionProbe.__doc__

    def check(self, model: Any, batch: Any) -> tuple[int, ...]:
        """To be called once per step, on every rank, between steps; the ranks found to be wrong.

        ``batch`` is this rank's micro-batch: tensors or arrays in lists, tuples and dicts, of which
        ``loss`` gets arrays. During ``fit`` a ``callbacks.CorruptionProbeCallback`` calls this.
        Collective at every ``every``-th call: two batches travel, and a digest of 16 bytes for
        each result; gradients only where digests differ. Raises :class:`SilentCorruption` and
        :class:`ReplicaMismatch` on every rank.
        """
        return self._check(KerasModel(self.loss, model, backend.differentiate), batch)
