"""The networks, told once for all frameworks: a name and an image shape in, layers and weights out.

Weights are NumPy arrays drawn from the seed, so that every framework starts from the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdsync.errors import HvdsyncError

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Convolution:
    """``filters`` filters of ``size`` x ``size``, zero padding that keeps height and width, ReLU,
    then the maximum of every 2 x 2 pixels."""

    channels: int
    filters: int
    size: int

    @property
    def kernel(self) -> tuple[int, ...]:
        """Shape of the weights: (size, size, channels, filters)."""
        return self.size, self.size, self.channels, self.filters


@dataclass(frozen=True)
class Dense:
    """All inputs to ``units`` outputs, with ReLU unless it is the last layer."""

    inputs: int
    units: int
    relu: bool

    @property
    def kernel(self) -> tuple[int, ...]:
        """Shape of the weights: (inputs, units)."""
        return self.inputs, self.units


@dataclass(frozen=True)
class Network:
    """Convolutions, then dense layers on their output flattened in the order height, width,
    channels. ``shape`` is the image's (H, W, C); the last layer gives the logits of the classes.
    In training, ``dropout`` is the share of each hidden dense layer's outputs that are set to 0."""

    name: str
    shape: tuple[int, int, int]
    convolutions: tuple[Convolution, ...]
    dense: tuple[Dense, ...]
    dropout: float = 0.0

    def initial_weights(self, seed: int) -> list[Array]:
        """Kernel and bias of each layer, float32.

        Kernels are uniform with a variance that keeps that of the signal (Glorot and Bengio 2010),
        biases 0.
        """
        generator = np.random.Generator(np.random.Philox(seed))
        weights: list[Array] = []
        layers: list[Convolution | Dense] = [*self.convolutions, *self.dense]
        for layer in layers:
            kernel = layer.kernel
            area = int(np.prod(kernel[:-2]))
            limit = np.sqrt(6 / (area * (kernel[-2] + kernel[-1])))
            weights += [
                generator.uniform(-limit, limit, kernel).astype(np.float32),
                np.zeros(kernel[-1], np.float32),
            ]
        return weights


_CONVOLUTIONS: dict[str, Sequence[int]] = {"linear": (), "mlp": (), "cnn": (16, 32)}
_HIDDEN: dict[str, Sequence[int]] = {"linear": (), "mlp": (256, 128), "cnn": (64,)}


def make_network(
    name: str, shape: tuple[int, int, int], classes: int, dropout: float = 0.0
) -> Network:
    """The network ``name`` ("linear", "mlp" or "cnn") for images of ``shape`` (H, W, C).

    "linear" has no hidden layer, so that ``dropout`` changes nothing there.

    Raises :class:`HvdsyncError` when the images are too small for it.
    """
    height, width, channels = shape
    convolutions = []
    for filters in _CONVOLUTIONS[name]:
        if min(height, width) < 2:
            raise HvdsyncError(
                f"--model {name}: images of {shape[0]} x {shape[1]} pixels are too small, it needs "
                f"at least {2 ** len(_CONVOLUTIONS[name])} each way; give --model mlp or linear"
            )
        convolutions.append(Convolution(channels, filters, 3))
        height, width, channels = height // 2, width // 2, filters
    sizes = [height * width * channels, *_HIDDEN[name], classes]
    dense: list[Any] = [
        Dense(inputs, units, relu=i < len(sizes) - 2)
        for i, (inputs, units) in enumerate(pairwise(sizes))
    ]
    return Network(name, shape, tuple(convolutions), tuple(dense), dropout)
