"""``Checkpoint`` for Keras on both backends: models and optimizers in, plain files out."""

from __future__ import annotations

from typing import Any

import keras

from hvdsync.checkpoint import checkpoint, keras_randomness, randomness
from hvdsync.checkpoint.codec import Codec
from hvdsync.checkpoint.keras_codec import KerasCodec
from hvdsync.checkpoint.rule_codec import RuleCodec


class Checkpoint(checkpoint.Checkpoint):
    """Checkpoints of Keras models, optimizers, variables, samplers and plain values.

    A model becomes ``<name>.keras``, which plain ``keras.models.load_model`` opens, and variables
    become ``<name>.npz``, without hvdsync and without Horovod. Arguments are those of
    :class:`hvdsync.checkpoint.checkpoint.Checkpoint`.
    """

    @staticmethod
    def _make_codec() -> Codec:
        return RuleCodec(KerasCodec(keras))


class RandomState(randomness.RandomState):
    """The random streams of each rank: Python's, NumPy's global one, Keras's and its backend's.

    Given to ``Checkpoint.save`` and ``restore`` under a name of its own it makes a resumed run
    draw the very numbers that the uninterrupted one would have drawn. ``generators`` are models,
    whose seed generators (of dropout, say) are meant, and further generators:
    ``keras.random.SeedGenerator``, those of the backend, ``numpy.random.Generator``,
    ``random.Random``.
    """

    def __init__(self, *generators: Any) -> None:
        streams = {
            "tensorflow": keras_randomness.with_tensorflow,
            "torch": keras_randomness.with_torch,
        }
        super().__init__(streams[keras.backend.backend()], generators)
