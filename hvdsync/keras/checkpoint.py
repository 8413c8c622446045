"""``Checkpoint`` for Keras on both backends: models and optimizers in, plain files out."""

from __future__ import annotations

import os

import keras

from hvdsync.checkpoint import checkpoint
from hvdsync.checkpoint.keras_codec import KerasCodec


class Checkpoint(checkpoint.Checkpoint):
    """Checkpoints of Keras models, optimizers, variables, samplers and plain values.

    A model becomes ``<name>.keras``, which plain ``keras.models.load_model`` opens, and variables
    become ``<name>.npz``, without hvdsync and without Horovod.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep: int = 3, every: int | None = None
    ) -> None:
        super().__init__(directory, keep, every, codec=KerasCodec(keras))
