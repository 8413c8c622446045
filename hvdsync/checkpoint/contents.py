"""What the files of a checkpoint hold: a folder in, names, shapes and dtypes out, no code run.

Needs none of the frameworks: files of PyTorch are read by a small unpickler that makes nothing.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdsync.checkpoint import keras_archive, per_rank
from hvdsync.errors import CheckpointError

_STORAGES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
}


@dataclass(frozen=True)
class Tensor:
    """One array in a file."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def tensors(path: Path) -> list[Tensor] | None:
    """The arrays in a ``.pt``, ``.npz`` or ``.keras`` file; None for other files.

    Raises :class:`CheckpointError` when the file does not read, or when a ``.keras`` file needs
    h5py and it is not installed.
    """
    reader = _of_ranks if path.name == per_rank.FILE else _READERS.get(path.suffix)
    if reader is None:
        return None
    try:
        return list(reader(path))
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{path}: looking inside needs {error.name}, not installed") from None
    except Exception as error:  # whatever a damaged file makes of a reader
        raise CheckpointError(f"{path} does not read: {error!r}") from error


def _of_torch(path: Path) -> Iterator[Tensor]:
    with zipfile.ZipFile(path) as file:
        pickled = next(name for name in file.namelist() if name.endswith("/data.pkl"))
        tree = _Inert(io.BytesIO(file.read(pickled))).load()
    yield from _walk("", tree)


def _of_numpy(path: Path) -> Iterator[Tensor]:
    with zipfile.ZipFile(path) as file:
        for name in file.namelist():
            with file.open(name) as member:
                version = np.lib.format.read_magic(member)
                read = {(1, 0): np.lib.format.read_array_header_1_0}.get(
                    version, np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = read(member)
            yield Tensor(name.removesuffix(".npy"), shape, dtype.name)


def _of_ranks(path: Path) -> Iterator[Tensor]:
    # Under the names of objects, not under the positions that the file has.
    yield from _walk("rank", per_rank.read(path.parent))


def _of_keras(path: Path) -> Iterator[Tensor]:
    for name, shape, dtype in keras_archive.arrays(path):
        yield Tensor(name, shape, dtype)


_READERS: dict[str, Callable[[Path], Iterator[Tensor]]] = {
    ".pt": _of_torch,
    ".npz": _of_numpy,
    ".keras": _of_keras,
}


def _walk(name: str, node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield Tensor(name, node.shape, node.dtype)
    elif isinstance(node, np.ndarray):
        yield Tensor(name, node.shape, node.dtype.name)
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _walk(f"{name}.{key}".lstrip("."), value)
    elif isinstance(node, list | tuple):
        for i, value in enumerate(node):
            yield from _walk(f"{name}.{i}".lstrip("."), value)


class _Inert(pickle.Unpickler):
    """Finds no class and calls no function that a pickle names; only tensors are recognised."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _Dict
        if module.startswith("torch") and name in ("_rebuild_tensor_v2", "_rebuild_tensor"):
            return _tensor
        if module.startswith("torch") and name == "_rebuild_parameter":
            return lambda tensor, *_: tensor
        if module == "torch" and name.endswith("Storage"):
            return _STORAGES.get(name.removesuffix("Storage"), name)
        return _nothing

    def persistent_load(self, pid: Any) -> Any:
        return pid[1]  # ("storage", type, key, device, size)


def _tensor(storage: Any, offset: int, shape: tuple[int, ...], *_: Any) -> Tensor:
    return Tensor("", tuple(shape), str(storage))


class _Dict(dict[Any, Any]):
    """Takes attributes too, as a module's state has."""


class _Nothing:
    """Stands for whatever a pickle makes besides; takes every state."""

    def __setstate__(self, state: Any) -> None:
        return None


def _nothing(*_: Any, **__: Any) -> _Nothing:
    return _Nothing()
