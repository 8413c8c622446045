"""How a framework's objects become files and come back: the part that each front door hands in.

Objects go in; plain files come out, and trees of arrays that any rank can put back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hvdsync.comm import trees


class Codec(ABC):
    """Files of one framework. ``name`` is the keyword under which the user gave an object."""

    @abstractmethod
    def handles(self, obj: Any) -> bool:
        """Whether this codec stores ``obj``; what it does not must be plain values."""

    @abstractmethod
    def snapshot(self, name: str, obj: Any) -> Any:
        """The state of ``obj`` as it is now, safe from what training does next."""

    def view(self, name: str, obj: Any) -> Any:
        """What :meth:`write` takes while nobody changes ``obj``; spares the copy where it can."""
        return self.snapshot(name, obj)

    @abstractmethod
    def write(self, folder: Path, name: str, snapshot: Any) -> None:
        """Put a snapshot or view into files of ``folder`` named after ``name``.

        May run in a thread; a snapshot then holds nothing of the object that lives.
        """

    @abstractmethod
    def read(self, folder: Path, name: str, obj: Any) -> Any:
        """The stored state as a tree of arrays and plain values. Runs no code from the file."""

    def check(self, obj: Any, tree: Any) -> None:  # noqa: B027
        """Raise ``CheckpointError`` when a tree does not fit ``obj``; touches nothing."""

    @abstractmethod
    def apply(self, obj: Any, tree: Any) -> None:
        """Put a tree into ``obj``. Raises ``CheckpointError`` when it does not fit."""

    def broadcast(self, tree: Any, name: str) -> Any:
        """The tree of rank 0 on every rank; this one carries NumPy leaves."""
        return broadcast_arrays(tree, name)

    def versions(self) -> Mapping[str, str]:
        """Versions of what writes the files, for the manifest."""
        return {}


def broadcast_arrays(tree: Any, name: str) -> Any:
    """A tree with NumPy leaves from rank 0, on every rank, in chunks."""
    return trees.broadcast_tree(
        tree,
        is_leaf=lambda node: isinstance(node, np.ndarray),
        describe=lambda array: (array.shape, array.dtype),
        allocate=lambda d: np.empty(d[0], d[1]),
        as_bytes=_bytes_of,
        name=name,
    )


def _bytes_of(array: np.ndarray) -> np.ndarray:
    if not array.flags.c_contiguous:
        raise ValueError("a checkpoint's arrays must be contiguous")
    return array.reshape(-1).view(np.uint8)
