"""The random streams of Keras on either backend: a model or generator in, its streams out."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from hvdsync.checkpoint import torch_randomness
from hvdsync.checkpoint.randomness import Stream


def with_tensorflow(generator: Any) -> dict[str, Stream] | None:
    """Streams of models, Keras's seed generators and ``tf.random.Generator``; of None the global
    ones of Keras and TensorFlow."""
    if generator is not None:
        return _streams(generator)
    tensorflow = importlib.import_module("tensorflow")
    state = tensorflow.random.get_global_generator().state
    return {**_global_stream(), "tensorflow": _of_variable(state)}


def with_torch(generator: Any) -> dict[str, Stream] | None:
    """Streams of models, Keras's seed generators and ``torch.Generator``; of None the global ones
    of Keras and PyTorch."""
    if generator is not None:
        return torch_randomness.streams(generator) or _streams(generator)
    return {**_global_stream(), **(torch_randomness.streams(None) or {})}


def _streams(generator: Any) -> dict[str, Stream] | None:
    if hasattr(generator, "variables") and hasattr(generator, "weights"):
        # Keras's draws are pure functions of the states of seed generators, on both backends.
        weights = {id(weight) for weight in generator.weights}
        seeds = [v for v in generator.variables if id(v) not in weights]
        return {f"seed {i}": _of_variable(seed) for i, seed in enumerate(seeds)}
    state = getattr(generator, "state", None)
    return {type(generator).__name__: _of_variable(state)} if hasattr(state, "assign") else None


def _global_stream() -> dict[str, Stream]:
    # What stands in where a layer or a call names no generator; no public name leads to it.
    seeds = importlib.import_module("keras.src.random.seed_generator")
    return {"keras": _of_variable(seeds.global_seed_generator().state)}


def _of_variable(variable: Any) -> Stream:
    return Stream(
        lambda: np.array(variable.__array__(), copy=True),
        lambda state: variable.assign(np.asarray(state)),
    )
