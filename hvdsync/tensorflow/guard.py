"""``check_replicas`` and ``Guard`` for TensorFlow: models and variables in, a verdict out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdsync.errors import HvdsyncError
from hvdsync.guard import keras_state, replicas
from hvdsync.guard.fingerprints import without
from hvdsync.guard.keras_guard import KerasGuard


def check_replicas(model: Any, optimizer: Any = None, *, ignore: Sequence[str] = ()) -> None:
    """Compare the state of all ranks, bit for bit; collective, in eager mode.

    Arguments:
        model: a Keras model, whose weights are meant, a ``tf.Module``, or variables. Seed
            generators and metrics are each rank's own.
        optimizer: by default the one that the model is compiled with: slots, step count, learning
            rate, and the scale of a ``LossScaleOptimizer``.
        ignore: shell patterns of variables' names that are not compared, such as
            ``"*/moving_*"``.

    On the wire: 17 bytes a rank while replicas are equal. Raises :class:`ReplicaMismatch` on every
    rank, naming the first variable that differs, the ranks that differ from the majority, and by
    how much; and ``HvdsyncError`` inside a ``tf.function``. With one rank it returns at once.
    """
    _refuse_graphs()
    keras_state.refuse_between_meetings(model, optimizer)
    replicas.check(lambda: without(keras_state.list_entries(model, optimizer), ignore))


class Guard(KerasGuard):
    __doc__ = KerasGuard.__doc__

    def check(self, model: Any, optimizer: Any = None) -> bool:
        _refuse_graphs()
        return super().check(model, optimizer)

    check.__doc__ = KerasGuard.check.__doc__


def _refuse_graphs() -> None:
    if tf.inside_function():
        raise HvdsyncError(
            "replicas are compared between steps, found a call inside a tf.function; call "
            "check_replicas or Guard.check from the loop around it"
        )
