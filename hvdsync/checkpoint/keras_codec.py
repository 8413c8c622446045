"""Keras models, optimizers and variables in, files that Keras and NumPy alone can open out.

Written once for ``hvdsync.tensorflow`` and ``hvdsync.keras``; Keras is handed in.
"""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hvdsync.checkpoint.codec import Codec
from hvdsync.errors import CheckpointError
from hvdsync.sync.keras_optimizer import build_alone
from hvdsync.sync.variables import as_array


class KerasCodec(Codec):
    """A model becomes ``<name>.keras``, with its optimizer's state when it is compiled.

    Optimizers, modules (anything with ``variables``), variables and lists of them become
    ``<name>.npz``, arrays named by position. Objects with a plain ``state_dict`` (samplers)
    become ``<name>.json``. Nothing that is read runs code.
    """

    def __init__(self, keras: ModuleType) -> None:
        self._keras = keras

    def handles(self, obj: Any) -> bool:
        return _is_stateful(obj) or self._variables(obj) is not None

    def snapshot(self, name: str, obj: Any) -> Any:
        if isinstance(obj, self._keras.Model):
            if not obj.built:
                raise CheckpointError(f"{name}: the model is not built yet; it has nothing to save")
            # A file's bytes: Keras writes a model that lives, and training goes on meanwhile.
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "model.keras")
                obj.save(path)
                return path.read_bytes()
        if _is_stateful(obj):
            return copy.deepcopy(obj.state_dict())
        return [as_array(variable) for variable in self._variables(obj) or ()]

    def write(self, folder: Path, name: str, snapshot: Any) -> None:
        if isinstance(snapshot, bytes):
            (folder / f"{name}.keras").write_bytes(snapshot)
        elif isinstance(snapshot, list):
            arrays: dict[str, Any] = dict(_named(snapshot))
            np.savez(folder / f"{name}.npz", **arrays)
        else:
            (folder / f"{name}.json").write_text(json.dumps(snapshot) + "\n")

    def read(self, folder: Path, name: str, obj: Any) -> Any:
        if isinstance(obj, self._keras.Model):
            self._load_model(folder / f"{name}.keras", name, obj)
            return [as_array(variable) for variable in self._variables(obj) or ()]
        if _is_stateful(obj):
            return json.loads((folder / f"{name}.json").read_text())
        with np.load(folder / f"{name}.npz", allow_pickle=False) as stored:
            return [_typed(key, stored[key]) for key in stored.files]

    def apply(self, obj: Any, tree: Any) -> None:
        if _is_stateful(obj):
            obj.load_state_dict(tree)
            return
        self._build_optimizer(obj)
        variables = self._variables(obj) or []
        if len(variables) != len(tree):
            raise CheckpointError(
                f"found {len(tree)} stored variables, expected {len(variables)}; is the optimizer "
                "built (optimizer.build(model.trainable_variables)) and the model the same?"
            )
        for variable, array in zip(variables, tree, strict=True):
            if tuple(variable.shape) != array.shape:
                label = getattr(variable, "path", variable.name)
                raise CheckpointError(
                    f"variable {label}: found shape {array.shape}, expected {tuple(variable.shape)}"
                )
        for variable, array in zip(variables, tree, strict=True):
            variable.assign(array)

    def _variables(self, obj: Any) -> list[Any] | None:
        """Everything in ``obj`` that is to be stored, in a fixed order; None for other objects."""
        if isinstance(obj, self._keras.Model):
            optimizer = getattr(obj, "optimizer", None)
            return [*obj.variables, *(optimizer.variables if optimizer is not None else ())]
        if isinstance(obj, list | tuple) and obj:
            parts = [self._variables(part) for part in obj]
            return None if any(p is None for p in parts) else [v for p in parts for v in p or ()]
        if hasattr(obj, "assign") and hasattr(obj, "shape"):
            return [obj]
        variables = getattr(obj, "variables", None)
        if variables is None or callable(variables):
            return None
        return list(variables)

    def _build_optimizer(self, obj: Any) -> None:
        optimizer = getattr(obj, "optimizer", None)
        if isinstance(obj, self._keras.Model) and optimizer is not None and not optimizer.built:
            # Rank 0 reads while the others wait for what it read.
            build_alone(optimizer, obj.trainable_variables)

    def _load_model(self, path: Path, name: str, model: Any) -> None:
        if not model.built:
            raise CheckpointError(
                f"{name}: build the model (model.build(input_shape)) before restoring into it"
            )
        self._build_optimizer(model)
        with warnings.catch_warnings():
            # Keras only warns when it leaves the optimizer's state out.
            warnings.filterwarnings("error", message="Skipping variable loading for optimizer")
            try:
                model.load_weights(path)
            except (ValueError, UserWarning) as error:
                raise CheckpointError(f"{path} does not fit {name!r}: {error}") from error


def _is_stateful(obj: Any) -> bool:
    return (
        hasattr(obj, "state_dict")
        and hasattr(obj, "load_state_dict")
        and not hasattr(obj, "trainable_variables")
    )


def _named(arrays: list[np.ndarray]) -> list[tuple[str, np.ndarray]]:
    """Arrays under their positions; dtypes that NumPy lacks (bfloat16) as bytes, named so."""
    named = []
    for i, array in enumerate(arrays):
        if array.dtype.kind == "V":
            raw = np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape, -1)
            named.append((f"{i:06d}.{array.dtype.name}", raw))
        else:
            named.append((f"{i:06d}", array))
    return named


def _typed(key: str, array: np.ndarray) -> np.ndarray:
    _, _, dtype = key.partition(".")
    return np.ascontiguousarray(array).view(np.dtype(dtype))[..., 0] if dtype else array
