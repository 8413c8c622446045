"""Variables through this process's memory: compared, broadcast, remembered and put back.

Written once for Keras on both backends; anything with ``shape``, ``dtype`` and ``assign`` goes in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdsync.comm import trees, world
from hvdsync.comm.comparison import require_equal
from hvdsync.comm.dtypes import dtype_name
from hvdsync.sync.tensorflow_gradients import name_of


def as_array(variable: Any) -> np.ndarray:
    """A copy of a variable's or tensor's value, of Keras on any backend or of TensorFlow."""
    # Asked directly: through np.array NumPy 2 warns of the keyword `copy` that Keras lacks.
    return np.array(variable.__array__(), copy=True, order="C")


def broadcast_through_host(variables: Sequence[Any], root_rank: int) -> None:
    """Give every rank the values of ``root_rank``, bit by bit; the root's own are not written to.

    On the wire: shapes and dtypes pickled, then the variables' bytes in chunks of 64 MiB. Raises
    :class:`RankMismatch` on every rank when shapes or dtypes differ.
    """
    comm = world.current()
    if comm.size == 1 or not variables:
        return
    refuse_different(variables)
    arrays = [as_array(variable) for variable in variables]
    raw = [array.reshape(-1).view(np.uint8) for array in arrays]
    trees.broadcast_buffers(raw, root_rank, "hvdsync.broadcast_variables")
    if comm.rank != root_rank:
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array)


def refuse_different(variables: Sequence[Any], process_set: Any = None) -> None:
    """Raise :class:`RankMismatch` on every rank unless shapes and dtypes are equal on all.

    Names may differ: Keras counts layers in a process, and a rank may have made others before.
    """
    kinds = {
        f"variable {i}": f"{tuple(v.shape)} {dtype_name(v.dtype)}" for i, v in enumerate(variables)
    }
    require_equal(
        "the variables",
        {"number of variables": len(variables), **kinds},
        "Build the same model on every rank before its variables are broadcast",
        labels={f"variable {i}": name_of(v) for i, v in enumerate(variables)},
        group=process_set,
    )


class VariablesMemory:
    """Remembers the values of the variables that ``listed()`` gives, in that order.

    What an elastic state commits and restores.
    """

    def __init__(self, listed: Callable[[], Sequence[Any]]) -> None:
        self._listed = listed
        self._values: list[np.ndarray] = []
        self.save()

    def save(self) -> None:
        """Copy the current values."""
        self._values = [as_array(variable) for variable in self._listed()]

    def restore(self) -> None:
        """Put the copied values back; variables that appeared since keep theirs."""
        for variable, value in zip(self._listed(), self._values, strict=False):
            variable.assign(value)
