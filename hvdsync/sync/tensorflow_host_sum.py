"""Tensors of a graph in, their sums over the ranks of this host out, in one call for all.

The graph calls into Python, where NumPy adds up what the ranks have in common; see ``host_sum``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import ModuleType
from typing import Any

import numpy as np

from hvdsync.comm import failures, host_memory, world
from hvdsync.comm.comparison import require_equal
from hvdsync.sync.host_sum import LINE, HostSum, Slot, aligned, share


@dataclass(frozen=True)
class _Layout:
    """Where arrays of these shapes are in a flat one: each begins on a cache line."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype

    @property
    def length(self) -> int:
        """Elements of the flat array."""
        return sum(map(self._room, self.shapes))

    def views(self, flat: np.ndarray) -> list[np.ndarray]:
        """The arrays in a flat one."""
        ends = accumulate(map(self._room, self.shapes))
        return [
            flat[end - self._room(shape) :][: math.prod(shape)].reshape(shape)
            for end, shape in zip(ends, self.shapes, strict=True)
        ]

    def _room(self, shape: tuple[int, ...]) -> int:
        line = LINE // self.dtype.itemsize
        return -(-math.prod(shape) // line) * line


class HostSums:
    """The sums, or averages, of one reducer's graphs."""

    def __init__(self, tf: ModuleType, hvd: ModuleType, *, averages: bool) -> None:
        self._tf = tf
        self._hvd = hvd
        self._averages = averages
        self._known: dict[Hashable, TensorSum | None] = {}

    @property
    def waited_seconds(self) -> float:
        """Seconds in which graphs stood still for the sums of all ranks so far."""
        return sum(known.waited_seconds for known in self._known.values() if known is not None)

    @staticmethod
    def may_be_used(tf: ModuleType) -> bool:
        """Whether graphs run where this memory is, and ranks are on one host."""
        return (
            host_memory.may_be_shared()
            and tf.compat.v1.executing_eagerly_outside_functions()
            and not tf.config.get_visible_devices("GPU")
        )

    def prepare(self, label: str, tensors: Sequence[Any], wanted: bool) -> TensorSum | None:
        """The sum for tensors like these, of known shapes and one dtype.

        Collective the first time that this label and these shapes come up, while a graph is made;
        it may be made again on one rank alone. None where the ranks have no memory in common, one
        of them has joined, or this is not ``wanted`` on all. Raises :class:`RankMismatch` on every
        rank when shapes, dtypes or reductions differ.
        """
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        dtypes = {tensor.dtype.name for tensor in tensors}
        key = (label, shapes, *sorted(dtypes), wanted)
        if key not in self._known:
            with self._tf.init_scope():
                layout = _Layout(shapes, np.dtype(dtypes.pop())) if wanted else None
                self._known[key] = self._share(label, layout)
        return self._known[key]

    def _share(self, label: str, layout: _Layout | None) -> TensorSum | None:
        comm = world.current()
        wanted = np.array([layout is not None], np.int32)
        present = comm.allreduce(wanted, "sum", f"{label}.wanted")
        if layout is None or int(present[0]) < comm.size:
            return None
        facts = {f"tensor {i}": f"shape {list(shape)}" for i, shape in enumerate(layout.shapes)}
        require_equal(
            f"the tensors of '{label}'",
            {**facts, "dtype": layout.dtype.name, "average": self._averages},
            "Look at what each of them gives there",
        )
        scale = 1.0 / comm.size if self._averages else 1.0
        slot = Slot(label, aligned(layout.length, layout.dtype), scale)
        shared = share([slot], self._ended)
        return None if shared is None else TensorSum(self._tf, shared[0], layout)

    def _ended(self, rank: int) -> BaseException | None:
        error = RuntimeError("Horovod has been shut down")
        return failures.of_waiting_for(rank, error, is_initialized=self._hvd.is_initialized())


class TensorSum:
    """One sum of several tensors; graphs are made with it, on the thread that makes them."""

    def __init__(self, tf: ModuleType, shared: HostSum, layout: _Layout) -> None:
        self._tf = tf
        self._shared = shared
        self._layout = layout
        self._places = layout.views(shared.mine)
        self.waited_seconds = 0.0

    def in_graph(self, tensors: Sequence[Any]) -> list[Any]:
        """The tensors, reduced. A call into Python, which blocks one of TensorFlow's threads."""
        types = [tensor.dtype for tensor in tensors]
        reduced = self._tf.numpy_function(self._reduce, list(tensors), types)
        for one, tensor in zip(reduced, tensors, strict=True):
            one.set_shape(tensor.shape)
        return list(reduced)

    def _reduce(self, *arrays: np.ndarray) -> list[np.ndarray]:
        shared = self._shared
        shared.clear()
        for place, array in zip(self._places, arrays, strict=True):
            np.copyto(place, array)
        shared.post()
        started = time.perf_counter()
        while not shared.advance():
            pass
        self.waited_seconds += time.perf_counter() - started
        # TensorFlow takes them over as they are; the next ones are in another array.
        return self._layout.views(shared.hand_over())
