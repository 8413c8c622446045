"""The models of ``bench step`` in Keras on TensorFlow: a name in; model and synthetic batch out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers

from hvdsync.tools.bench.models import MODELS

Batch = tuple[np.ndarray, np.ndarray]


def make(name: str, seed: int = 0) -> keras.Model:
    """The model ``name`` of ``MODELS``, built, with weights drawn from the seed."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input(
        MODELS[name].inputs, dtype="int32" if MODELS[name].vocabulary else "float32"
    )
    return keras.Model(inputs, _MAKERS[name](inputs))


def batch_for(name: str, seed: int) -> Batch:
    """Synthetic inputs and labels of one step of one rank."""
    model = MODELS[name]
    generator = np.random.default_rng(seed)
    labels = generator.integers(model.classes, size=model.batch_size).astype(np.int32)
    shape = (model.batch_size, *model.inputs)
    if model.vocabulary:
        return generator.integers(model.vocabulary, size=shape).astype(np.int32), labels
    return generator.random(shape, np.float32), labels


def _dense(*units: int) -> Callable[[Any], Any]:
    def build(x: Any) -> Any:
        for width in units[:-1]:
            x = layers.Dense(width, activation="relu")(x)
        return layers.Dense(units[-1])(x)

    return build


def _cnn(x: Any) -> Any:
    for filters in (16, 32):
        x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        x = layers.MaxPooling2D(2)(x)
    return layers.Dense(10)(layers.Dense(64, activation="relu")(layers.Flatten()(x)))


def _residual(x: Any, filters: int, stride: int) -> Any:
    inner = layers.Conv2D(filters, 3, stride, padding="same", use_bias=False)(x)
    inner = layers.ReLU()(layers.BatchNormalization()(inner))
    inner = layers.Conv2D(filters, 3, padding="same", use_bias=False)(inner)
    inner = layers.BatchNormalization()(inner)
    if stride != 1 or x.shape[-1] != filters:
        x = layers.BatchNormalization()(layers.Conv2D(filters, 1, stride, use_bias=False)(x))
    return layers.ReLU()(layers.Add()([inner, x]))


def _resnet18(x: Any) -> Any:
    """ResNet-18 (1512.03385) with the small first convolution that is usual for 32 x 32 pixels."""
    x = layers.Conv2D(64, 3, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    for filters, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        x = _residual(_residual(x, filters, stride), filters, 1)
    return layers.Dense(10)(layers.GlobalAveragePooling2D()(x))


class _Places(layers.Layer):
    """Adds a trained vector to each place of a sequence."""

    def build(self, shape: Any) -> None:
        self.places = self.add_weight(shape=shape[1:], initializer="zeros", name="places")

    def call(self, x: Any) -> Any:
        return x + self.places


def _transformer(x: Any, width: int = 128) -> Any:
    """An encoder of four layers (1706.03762) that reads tokens and names a class."""
    x = _Places()(layers.Embedding(MODELS["transformer"].vocabulary, width)(x))
    for _ in range(4):
        attended = layers.MultiHeadAttention(4, width // 4)(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        inner = layers.Dense(width)(layers.Dense(4 * width, activation="relu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, inner]))
    return layers.Dense(10)(layers.GlobalAveragePooling1D()(x))


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "linear": _dense(10),
    "mlp": _dense(512, 512, 10),
    "deep": _dense(*[64] * 39, 10),
    "cnn": _cnn,
    "wide": _dense(2800, 2800, 10),
    "resnet18": _resnet18,
    "transformer": _transformer,
}
