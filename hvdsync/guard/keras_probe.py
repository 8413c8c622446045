"""``CorruptionProbe`` of Keras models: written once for TensorFlow and Keras on both backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdsync.comm import trees
from hvdsync.guard import keras_state
from hvdsync.guard.fingerprints import Entry
from hvdsync.sync.tensorflow_gradients import name_of, variable_of
from hvdsync.sync.variables import as_array

# Computes a loss, and gives its gradients with respect to variables, each None or an array.
Differentiate = Callable[[Callable[[], Any], Sequence[Any]], Sequence[Any]]


def tape_differentiates(tf: ModuleType) -> Differentiate:
    """Gradients by TensorFlow's tape; ``tf`` is handed in."""

    def differentiate(loss: Callable[[], Any], variables: Sequence[Any]) -> list[Any]:
        with tf.GradientTape() as tape:
            value = loss()
        found = tape.gradient(value, [variable_of(variable) for variable in variables])
        return [None if g is None else tf.convert_to_tensor(g).numpy() for g in found]

    return differentiate


class KerasModel:
    """See :class:`hvdsync.guard.probe.Backend`.

    ``model`` is a Keras model or a ``tf.Module``. Its variables that are not trained, of seed
    generators too, are its state; noise that is drawn otherwise is not the same everywhere.
    """

    def __init__(
        self, loss: Callable[[Any, Any], Any], model: Any, differentiate: Differentiate
    ) -> None:
        self._loss = loss
        self._model = model
        self._differentiate = differentiate
        self._trained = list(model.trainable_variables)
        known = {id(variable) for variable in self._trained}
        self._others = [v for v in model.variables if id(v) not in known]

    def portable(self, batch: Any) -> Any:
        skeleton, leaves = trees.split(batch, lambda leaf: hasattr(leaf, "__array__"))
        return trees.join(skeleton, [as_array(leaf) for leaf in leaves])

    def state(self) -> list[np.ndarray]:
        return [as_array(variable) for variable in self._others]

    def parameters(self) -> list[Entry]:
        return keras_state.entries_of("model", self._trained)

    def put(self, state: list[np.ndarray]) -> None:
        for variable, value in zip(self._others, state, strict=True):
            variable.assign(value)

    def gradients(self, batch: Any, seed: int) -> list[tuple[str, np.ndarray]]:
        found = self._differentiate(lambda: self._loss(self._model, batch), self._trained)
        nothing = np.empty(0, np.float32)
        return [
            (name_of(variable), nothing if gradient is None else np.asarray(gradient))
            for variable, gradient in zip(self._trained, found, strict=True)
        ]
