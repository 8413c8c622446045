"""Networks and optimizers as Keras has them, for the TensorFlow and the Keras worker."""

from __future__ import annotations

from typing import Any

import keras

from hvdsync.train.config import TrainConfig
from hvdsync.train.models import Array, Network


def make_model(network: Network, weights: list[Array]) -> keras.Model:
    """A :class:`Network` in Keras: images (B, H, W, C) to logits (B, classes)."""
    images = keras.Input(network.shape, name="images")
    x = images
    for layer in network.convolutions:
        x = keras.layers.Conv2D(layer.filters, layer.size, padding="same", activation="relu")(x)
        x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Flatten()(x)
    for dense in network.dense:
        x = keras.layers.Dense(dense.units, activation="relu" if dense.relu else None)(x)
    model = keras.Model(images, x, name=network.name)
    model.set_weights(weights)
    return model


def make_optimizer(config: TrainConfig) -> Any:
    """The plain optimizer that ``--optimizer`` names; its rate is set before each step."""
    if config.optimizer in ("sgd", "momentum"):
        momentum = 0.9 if config.optimizer == "momentum" else 0.0
        return keras.optimizers.SGD(config.lr, momentum=momentum)
    if config.optimizer == "adam":
        return keras.optimizers.Adam(config.lr)
    return keras.optimizers.AdamW(config.lr, weight_decay=0.004)
