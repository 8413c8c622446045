"""Networks and optimizers as Keras has them, for the TensorFlow and the Keras worker."""

from __future__ import annotations

from typing import Any

import keras

from hvdsync.data.seeds import rank_seed
from hvdsync.train.config import TrainConfig
from hvdsync.train.models import Array, Network

# More than there can be ranks, whose seeds are neighbours.
_BETWEEN_LAYERS = 2**20


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
        if network.dropout and dense.relu:
            x = keras.layers.Dropout(network.dropout, seed=0)(x)
    model = keras.Model(images, x, name=network.name)
    model.set_weights(weights)
    return model


def noise_states(model: keras.Model) -> list[Any]:
    """The variables that decide what dropout leaves out next: those that no two ranks share."""
    layers = [layer for layer in model.layers if isinstance(layer, keras.layers.Dropout)]
    return [layer.seed_generator.state for layer in layers]


def seed_noise(model: keras.Model, seed: int, step: int = 0) -> None:
    """Let ``seed``, ``step`` and this process's rank decide what dropout leaves out from now on."""
    for i, state in enumerate(noise_states(model)):
        # Layers of one seed would leave out the same units.
        layer_seed = (rank_seed(seed, step=step) + i * _BETWEEN_LAYERS) % 2**31
        state.assign(keras.ops.convert_to_tensor([layer_seed, 0], state.dtype))


def make_optimizer(config: TrainConfig) -> Any:
    """The plain optimizer that ``--optimizer`` names; its rate is set before each step."""
    if config.optimizer in ("sgd", "momentum"):
        return keras.optimizers.SGD(config.lr, momentum=config.momentum)
    if config.optimizer == "adam":
        return keras.optimizers.Adam(config.lr)
    return keras.optimizers.AdamW(config.lr, weight_decay=0.004)
