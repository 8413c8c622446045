"""Nested state (dicts, lists, tuples with array leaves) from one rank to all, in bounded chunks.

A tree or a list of byte buffers of the root goes in; the same values come out on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdsync.comm import verbs, world

CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Slot:
    """The place of a leaf that was taken out of a tree."""

    index: int


def split(tree: Any, is_leaf: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """A copy of ``tree`` with a :class:`Slot` for each leaf, and the leaves in slot order."""
    leaves: list[Any] = []

    def walk(node: Any) -> Any:
        if is_leaf(node):
            leaves.append(node)
            return Slot(len(leaves) - 1)
        return _map_children(node, walk)

    return walk(tree), leaves


def join(skeleton: Any, leaves: Sequence[Any]) -> Any:
    """The tree whose slots are filled with ``leaves``: undoes :func:`split`."""

    def walk(node: Any) -> Any:
        return leaves[node.index] if isinstance(node, Slot) else _map_children(node, walk)

    return walk(skeleton)


def _map_children(node: Any, walk: Callable[[Any], Any]) -> Any:
    if isinstance(node, dict):
        copy = {key: walk(value) for key, value in node.items()}
        if type(node) is dict:
            return copy
        same = type(node)(copy)
        # A module's state keeps the versions of its layers in an attribute.
        if attributes := getattr(node, "__dict__", None):
            vars(same).update(attributes)
        return same
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*(walk(value) for value in node))
    if isinstance(node, list | tuple):
        return type(node)(walk(value) for value in node)
    return node


def broadcast_buffers(buffers: Sequence[np.ndarray], root: int, name: str) -> None:
    """Overwrite these byte buffers, on every rank, with those of rank ``root``.

    ``buffers`` are one-dimensional, writable uint8 arrays; every rank gives as many, of equal
    lengths. They travel as one stream cut into chunks of 64 MiB, so many small ones cost few
    broadcasts and a large one needs no second copy of itself.
    """
    comm = world.current()
    if comm.size == 1:
        return
    at_root = comm.rank == root
    window: list[np.ndarray] = []
    filled = 0

    def exchange() -> None:
        nonlocal filled
        if not filled:
            return
        chunk = np.concatenate(window) if at_root else np.empty(filled, np.uint8)
        received = comm.broadcast(chunk, root, name)
        if not at_root:
            start = 0
            for part in window:
                part[...] = received[start : start + len(part)]
                start += len(part)
        window.clear()
        filled = 0

    for buffer in buffers:
        start = 0
        while start < len(buffer):
            part = buffer[start : start + CHUNK_BYTES - filled]
            window.append(part)
            filled += len(part)
            start += len(part)
            if filled == CHUNK_BYTES:
                exchange()
    exchange()


def broadcast_tree(
    tree: Any,
    *,
    is_leaf: Callable[[Any], bool],
    describe: Callable[[Any], Any],
    allocate: Callable[[Any], Any],
    as_bytes: Callable[[Any], np.ndarray],
    root: int = 0,
    name: str,
) -> Any:
    """The tree of rank ``root``, on every rank; what the others give is not looked at.

    ``describe(leaf)`` is what ``allocate`` needs to make an empty leaf of the same kind;
    ``as_bytes(leaf)`` is a flat uint8 view of a leaf's memory. The skeleton travels pickled, the
    leaves as bytes.
    """
    comm = world.current()
    if comm.size == 1:
        return tree
    at_root = comm.rank == root
    skeleton, leaves = split(tree, is_leaf) if at_root else (None, [])
    skeleton, descriptions = verbs.broadcast_object(
        (skeleton, [describe(leaf) for leaf in leaves]), root, f"{name}.skeleton"
    )
    if not at_root:
        leaves = [allocate(description) for description in descriptions]
    broadcast_buffers([as_bytes(leaf) for leaf in leaves], root, f"{name}.leaves")
    return tree if at_root else join(skeleton, leaves)
