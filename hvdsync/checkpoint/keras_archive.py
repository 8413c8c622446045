"""A ``.keras`` file in two steps: what Keras would save is copied now, and written later.

A model goes in, its configuration, arrays and assets come out; a thread may make the file of them.
"""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

_CONFIG = "config.json"
_METADATA = "metadata.json"
_WEIGHTS = "model.weights.h5"
_ASSETS = "assets"


@dataclass
class Archive:
    """The content of a ``.keras`` file, apart from the model that it was taken from."""

    config: str
    metadata: str
    groups: list[Group]
    assets: dict[str, bytes]

    def write(self, path: Path) -> None:
        """Make the file. Nothing of the model is touched, nor the device that it is on."""
        library = _saving_library()
        weights = path.with_suffix(".h5")
        store = library.H5IOStore(weights, mode="w")
        try:
            for group in self.groups:
                entry = store.make(group.path, metadata=group.metadata)
                for key, array in group.values.items():
                    entry[key] = array
        finally:
            store.close()
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(_METADATA, self.metadata)
            file.writestr(_CONFIG, self.config)
            file.write(weights, _WEIGHTS)
            for name, content in self.assets.items():
                file.writestr(f"{_ASSETS}/{name}", content)
        weights.unlink()


@dataclass
class Group:
    """The arrays of one layer or optimizer, and where they stand in the file."""

    path: str
    metadata: dict[str, Any] | None
    values: dict[str, Any] = field(default_factory=dict)


def record(model: Any) -> Archive:
    """Copy everything that ``model.save`` would write.

    Raises ``ImportError`` or ``AttributeError`` where Keras saves in another way than the version
    that hvdsync is made for; ``model.save`` is the way then.
    """
    library = _saving_library()
    config, metadata = library._serialize_model_as_json(model)
    # Keras's own optimizers hand over copies; a layer may hand over an array that it goes on using.
    copied = "optimizer" if _saves_as_keras_does(getattr(model, "optimizer", None)) else None

    def keep(path: str, value: Any) -> Any:
        return np.asarray(value) if path == copied else own_array(value)

    assets = library.DiskIOStore(_ASSETS, mode="w")
    try:
        groups = _walk(library, model, assets, keep)
        folder = Path(assets.working_dir)
        content = {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    finally:
        assets.close()
    return Archive(config, metadata, groups, content)


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the arrays that ``model.save`` would write. Raises as :func:`record`."""
    groups = _walk(_saving_library(), model, None, lambda path, value: tuple(value.shape))
    return {
        f"{group.path}/vars/{key}".lstrip("/"): shape
        for group in groups
        for key, shape in group.values.items()
    }


def stored_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the arrays in a ``.keras`` file."""
    return {name: shape for name, shape, _ in arrays(path)}


def arrays(path: Path) -> Iterable[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of each array in a ``.keras`` file. Needs h5py; loads none of them."""
    import h5py

    found = []

    def visit(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            dtype = node.attrs.get("dtype", node.dtype.name)
            found.append((name, tuple(node.shape), str(dtype)))

    with (
        zipfile.ZipFile(path) as file,
        file.open(_WEIGHTS) as member,
        h5py.File(member, "r") as weights,
    ):
        weights.visititems(visit)
    return found


def own_array(value: Any) -> np.ndarray:
    """A variable's value in memory of its own, copied once."""
    array = value if isinstance(value, np.ndarray) else np.asarray(value.__array__())
    # What Keras hands over is a copy already, or a view of the variable's memory.
    return array if array.flags.owndata and array is not value else array.copy(order="C")


def _saves_as_keras_does(optimizer: Any) -> bool:
    import keras

    kept: bool = (
        getattr(type(optimizer), "save_own_variables", None)
        is keras.optimizers.Optimizer.save_own_variables
    )
    return kept


def _walk(
    library: ModuleType, model: Any, assets: Any, keep: Callable[[str, Any], Any]
) -> list[Group]:
    groups: list[Group] = []

    class Entry(dict[str, Any]):
        def __init__(self, path: str) -> None:
            super().__init__()
            self._path = path

        def __setitem__(self, key: str, value: Any) -> None:
            super().__setitem__(key, keep(self._path, value))

    class Recorder(library.NpzIOStore):  # type: ignore[misc, name-defined]
        """Stands where Keras wants a store; keeps what it is given."""

        def __init__(self) -> None:
            pass

        def make(self, path: str, metadata: dict[str, Any] | None = None) -> Entry:
            groups.append(Group(path, metadata, Entry(path)))
            return groups[-1].values  # type: ignore[return-value]

    library._save_state(
        model,
        weights_store=Recorder(),
        assets_store=assets,
        inner_path="",
        visited_saveables=set(),
    )
    return groups


def _saving_library() -> ModuleType:
    return importlib.import_module("keras.src.saving.saving_lib")
