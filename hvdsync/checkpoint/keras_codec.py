"""Keras models, optimizers and variables in, files that Keras and NumPy alone can open out.

Written once for ``hvdsync.tensorflow`` and ``hvdsync.keras``; Keras is handed in.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hvdsync.checkpoint import differences, keras_archive, plain
from hvdsync.checkpoint.codec import Codec
from hvdsync.checkpoint.keras_archive import Archive
from hvdsync.errors import CheckpointError
from hvdsync.sync.keras_optimizer import build_alone

logger = logging.getLogger(__name__)


class KerasCodec(Codec):
    """A model becomes ``<name>.keras``, with its optimizer's state when it is compiled.

    Optimizers, modules (anything with ``variables``), variables and lists of them become
    ``<name>.npz``, arrays named by position. Objects with a plain ``state_dict`` (samplers)
    become ``<name>.json``. Nothing that is read runs code.
    """

    def __init__(self, keras: ModuleType) -> None:
        self._keras = keras
        self._unrecordable = False

    def handles(self, obj: Any) -> bool:
        return _is_stateful(obj) or self._variables(obj) is not None

    def snapshot(self, name: str, obj: Any) -> Any:
        if isinstance(obj, self._keras.Model):
            _refuse_unbuilt(name, obj)
            return self._record(name, obj)
        return self.view(name, obj)

    def view(self, name: str, obj: Any) -> Any:
        if isinstance(obj, self._keras.Model):
            _refuse_unbuilt(name, obj)
            return obj
        if _is_stateful(obj):
            return plain.to_json(obj.state_dict(), f"the state of {name!r}")
        return [keras_archive.own_array(variable) for variable in self._variables(obj) or ()]

    def write(self, folder: Path, name: str, snapshot: Any) -> None:
        path = folder / f"{name}.keras"
        if isinstance(snapshot, Archive):
            snapshot.write(path)
        elif isinstance(snapshot, bytes):
            path.write_bytes(snapshot)
        elif isinstance(snapshot, str):
            (folder / f"{name}.json").write_text(snapshot)
        elif isinstance(snapshot, list):
            arrays: dict[str, Any] = dict(_named(snapshot))
            np.savez(folder / f"{name}.npz", **arrays)
        else:
            snapshot.save(path)

    def read(self, folder: Path, name: str, obj: Any) -> Any:
        if isinstance(obj, self._keras.Model):
            self._load_model(folder / f"{name}.keras", name, obj)
            return [keras_archive.own_array(variable) for variable in self._variables(obj) or ()]
        if _is_stateful(obj):
            return json.loads((folder / f"{name}.json").read_text())
        with np.load(folder / f"{name}.npz", allow_pickle=False) as stored:
            return [_typed(key, stored[key]) for key in stored.files]

    def check(self, obj: Any, tree: Any) -> None:
        if _is_stateful(obj):
            return
        if isinstance(obj, self._keras.Model):
            _refuse_unbuilt("the model", obj)
        self._build_optimizer(obj)
        variables = self._variables(obj) or []
        if len(variables) != len(tree):
            raise CheckpointError(
                f"found {len(tree)} stored variables, expected {len(variables)}; is the optimizer "
                "built (optimizer.build(model.trainable_variables)) and the model the same?"
            )
        labels = [getattr(v, "path", v.name) for v in variables]
        difference = differences.compare(
            {label: array.shape for label, array in zip(labels, tree, strict=True)},
            {label: tuple(v.shape) for label, v in zip(labels, variables, strict=True)},
        )
        if difference:
            raise CheckpointError(f"it is of other variables; {difference}")

    def apply(self, obj: Any, tree: Any) -> None:
        if _is_stateful(obj):
            obj.load_state_dict(tree)
            return
        for variable, array in zip(self._variables(obj) or (), tree, strict=True):
            variable.assign(array)

    def versions(self) -> Mapping[str, str]:
        return {"keras": self._keras.__version__, "backend": self._keras.backend.backend()}

    def _record(self, name: str, model: Any) -> Archive | bytes:
        if not self._unrecordable:
            try:
                return keras_archive.record(model)
            except (ImportError, AttributeError, TypeError) as error:
                self._unrecordable = True
                logger.warning(
                    "%s: Keras %s saves in a way that hvdsync does not know (%r); saves in the "
                    "background wait until the file is made",
                    name,
                    self._keras.__version__,
                    error,
                )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.keras")
            model.save(path)
            return path.read_bytes()

    def _variables(self, obj: Any) -> list[Any] | None:
        """Everything in ``obj`` that is to be stored, in a fixed order; None for other objects.

        Of a model its weights, not its seed generators: those are each rank's own, and no part of
        what Keras saves (``RandomState`` keeps them).
        """
        if isinstance(obj, self._keras.Model):
            optimizer = getattr(obj, "optimizer", None)
            return [*obj.weights, *(optimizer.variables if optimizer is not None else ())]
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
        _refuse_unbuilt(name, model)
        self._build_optimizer(model)
        self._refuse_another_model(path, name, model)
        with warnings.catch_warnings():
            # Keras only warns when it leaves the optimizer's state out.
            warnings.filterwarnings("error", message="Skipping variable loading for optimizer")
            try:
                model.load_weights(path)
            except (ValueError, UserWarning) as error:
                raise CheckpointError(f"{path} does not fit {name!r}: {error}") from error

    def _refuse_another_model(self, path: Path, name: str, model: Any) -> None:
        """Before Keras, which stops in the middle, and says nothing of arrays that are too many."""
        try:
            expected = keras_archive.shapes(model)
        except (ImportError, AttributeError, TypeError):
            return  # another Keras; its own checks remain
        found = keras_archive.stored_shapes(path)
        if getattr(model, "optimizer", None) is None:
            found = {k: shape for k, shape in found.items() if not k.startswith("optimizer/")}
        if difference := differences.compare(found, expected):
            raise CheckpointError(f"{path} does not fit {name!r}: {difference}")


def _refuse_unbuilt(name: str, model: Any) -> None:
    if not model.built:
        raise CheckpointError(
            f"{name}: the model is not built yet, so it has no variables; call it once, or "
            "model.build(input_shape), on every rank"
        )


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
