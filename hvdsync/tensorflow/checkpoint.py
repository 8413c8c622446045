"""``Checkpoint`` for TensorFlow: Keras models, optimizers and variables in, plain files out."""

from __future__ import annotations

from typing import Any

import keras

from hvdsync.checkpoint import checkpoint, keras_randomness, randomness
from hvdsync.checkpoint.codec import Codec
from hvdsync.checkpoint.keras_codec import KerasCodec
from hvdsync.checkpoint.rule_codec import RuleCodec


class Checkpoint(checkpoint.Checkpoint):
    """Checkpoints of Keras models, optimizers, ``tf.Variable`` and ``tf.Module``, plain values.

    A model becomes ``<name>.keras``, which plain ``keras.models.load_model`` opens, and variables
    become ``<name>.npz``, without hvdsync and without Horovod. Arguments are those of
    :class:`hvdsync.checkpoint.checkpoint.Checkpoint`.
    """

    @staticmethod
    def _make_codec() -> Codec:
        return RuleCodec(KerasCodec(keras))


class RandomState(randomness.RandomState):
    """The random streams of each rank: Python's, NumPy's global one, Keras's and TensorFlow's
    global generator.

    Given to ``Checkpoint.save`` and ``restore`` under a name of its own it makes a resumed run
    draw the very numbers that the uninterrupted one would have drawn. ``generators`` are models,
    whose seed generators (of dropout, say) are meant, and further generators:
    ``keras.random.SeedGenerator``, ``tf.random.Generator``, ``numpy.random.Generator``,
    ``random.Random``.

    The older ``tf.random.uniform`` and its kind keep their place in kernels, where nobody can
    read it: use a generator, or the stateless operations.
    """

    def __init__(self, *generators: Any) -> None:
        super().__init__(keras_randomness.with_tensorflow, generators)
