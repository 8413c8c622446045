"""Plain state as text and arrays: nested dicts and lists in, a JSON text or an ``.npz`` file out.

What would come back as something else (a key that is no string, an object) is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hvdsync.comm import trees
from hvdsync.errors import CheckpointError

_TREE = "tree.json"
_ARRAY = "__array__"


def to_json(value: Any, what: str) -> str:
    """The JSON text of plain values. Raises :class:`CheckpointError`, with ``what`` in it."""
    _refuse_keys(value, what)
    try:
        return json.dumps(value, indent=2) + "\n"
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what}: {error}") from error


def write_tree(path: Path, tree: Any, what: str) -> None:
    """Write plain values with NumPy arrays among them to one ``.npz`` file, without pickle.

    Arrays stand under their positions, all else as JSON under ``tree.json``.
    """
    skeleton, arrays = trees.split(tree, is_array)
    for array in arrays:
        if array.dtype.kind in "OV":
            raise CheckpointError(f"{what}: an array of {array.dtype} cannot be stored plainly")
    text = to_json(_map_slots(skeleton), what)
    stored: dict[str, Any] = {f"{i:06d}": array for i, array in enumerate(arrays)}
    stored[_TREE] = np.frombuffer(text.encode(), np.uint8)
    np.savez(path, **stored)


def read_tree(path: Path) -> Any:
    """What :func:`write_tree` wrote; lists come back where tuples were."""
    with np.load(path, allow_pickle=False) as stored:
        tree = json.loads(stored[_TREE].tobytes())
        return _fill_slots(tree, {key: stored[key] for key in stored.files if key != _TREE})


def is_array(node: Any) -> bool:
    """Whether a node of a tree is a leaf that travels and is stored as an array."""
    return isinstance(node, np.ndarray)


def _map_slots(node: Any) -> Any:
    if isinstance(node, trees.Slot):
        return {_ARRAY: f"{node.index:06d}"}
    if isinstance(node, dict):
        return {key: _map_slots(value) for key, value in node.items()}
    return [_map_slots(value) for value in node] if isinstance(node, list | tuple) else node


def _fill_slots(node: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(node, dict):
        if set(node) == {_ARRAY} and node[_ARRAY] in arrays:
            return arrays[node[_ARRAY]]
        return {key: _fill_slots(value, arrays) for key, value in node.items()}
    return [_fill_slots(value, arrays) for value in node] if isinstance(node, list) else node


def _refuse_keys(node: Any, what: str) -> None:
    if isinstance(node, dict):
        for key, value in node.items():
            if not isinstance(key, str):
                raise CheckpointError(
                    f"{what}: the key {key!r} would come back as a string; use string keys"
                )
            _refuse_keys(value, what)
    elif isinstance(node, list | tuple):
        for value in node:
            _refuse_keys(value, what)
