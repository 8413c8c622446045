"""Flat tensors of a graph in, their sums over the ranks of this host out, in one call for all.

The graph calls into Python, where NumPy adds up what the ranks have in common; see ``host_sum``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdsync.comm import failures, host_memory, world
from hvdsync.sync.host_sum import HostSum, Slot, share


class HostSums:
    """The sums, or averages, of one reducer's graphs."""

    def __init__(self, tf: ModuleType, hvd: ModuleType, *, averages: bool) -> None:
        self._tf = tf
        self._hvd = hvd
        self._averages = averages
        self._known: dict[tuple[tuple[str, int, str], ...], list[HostSum] | None] = {}

    @staticmethod
    def may_be_used(tf: ModuleType) -> bool:
        """Whether graphs run where this memory is, and ranks are on one host."""
        return (
            host_memory.may_be_shared()
            and tf.compat.v1.executing_eagerly_outside_functions()
            and not tf.config.get_visible_devices("GPU")
        )

    def prepare(self, flats: Sequence[tuple[str, Any]]) -> list[HostSum] | None:
        """The sums for named flat tensors of known lengths, while a graph is made.

        Collective the first time that these names and lengths come up; a graph may be made again on
        one rank alone. None where the ranks have no memory in common, or one of them has joined.
        """
        key = tuple((name, int(flat.shape[0]), flat.dtype.name) for name, flat in flats)
        if key not in self._known:
            with self._tf.init_scope():
                comm = world.current()
                here = comm.allreduce(np.ones(1, np.int32), "sum", f"{key[0][0]}.here")
                self._known[key] = None
                if int(here[0]) == comm.size:
                    scale = 1.0 / comm.size if self._averages else 1.0
                    slots = [
                        Slot(name, np.empty(length, dtype), scale) for name, length, dtype in key
                    ]
                    self._known[key] = share(slots, self._ended)
        return self._known[key]

    def add_up(self, sums: Sequence[HostSum], flats: Sequence[Any]) -> list[Any]:
        """The graph's tensors summed over ranks; in a graph."""
        tf = self._tf

        def run(*arrays: np.ndarray) -> list[np.ndarray]:
            for one, array in zip(sums, arrays, strict=True):
                one.clear()
                one.mine[:] = array
                one.post()
            waiting = list(sums)
            while waiting:
                waiting = [one for one in waiting if not one.advance()]
            # The graph keeps what it is given; the next turn has new arrays.
            return [one.hand_over() for one in sums]

        types = [flat.dtype for flat in flats]
        reduced = tf.numpy_function(run, list(flats), types)
        for one, flat in zip(reduced, flats, strict=True):
            one.set_shape(flat.shape)
        return list(reduced)

    def _ended(self) -> BaseException | None:
        if self._hvd.is_initialized():
            return None
        error = RuntimeError("Horovod has been shut down")
        return failures.explain(error) or error
