"""What the models of ``bench step`` are fed, in every framework."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """``inputs`` is the shape of one sample: pixels (height, width, channels last), or tokens."""

    inputs: tuple[int, ...]
    batch_size: int
    classes: int = 10
    vocabulary: int = 0


MODELS = {
    "linear": Model((784,), 64),
    "mlp": Model((784,), 64),  # 0.7 million parameters
    "deep": Model((784,), 64),  # forty narrow layers
    "cnn": Model((28, 28, 1), 32),
    "wide": Model((784,), 64),  # ten million
    "resnet18": Model((32, 32, 3), 4),  # eleven million, almost all in convolutions
    "transformer": Model((64,), 8, vocabulary=1000),
}
