"""``CorruptionProbe`` for TensorFlow: a model and a batch in, the ranks that are wrong out."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdsync.errors import HvdsyncError
from hvdsync.guard import probe
from hvdsync.guard.keras_probe import KerasModel, tape_differentiates


class CorruptionProbe(probe.CorruptionProbe):
    __doc__ = probe.CorruptionProbe.__doc__

    def check(self, model: Any, batch: Any) -> tuple[int, ...]:
        """To be called once per step, on every rank, between steps; the ranks found to be wrong.

        ``model`` is a Keras model or a ``tf.Module``, ``batch`` this rank's micro-batch: tensors or
        arrays in lists, tuples and dicts, of which ``loss`` gets arrays. Collective at every
        ``every``-th call: two batches travel, and a digest of 16 bytes for each result; gradients
        only where digests differ. Raises :class:`SilentCorruption` and :class:`ReplicaMismatch` on
        every rank, and ``HvdsyncError`` inside a ``tf.function``.
        """
        if tf.inside_function():
            raise HvdsyncError(
                "a probe computes between steps, found a call inside a tf.function; call "
                "CorruptionProbe.check from the loop around it"
            )
        return self._check(KerasModel(self.loss, model, tape_differentiates(tf)), batch)
