"""The array operations of compressors, for PyTorch tensors; ``torch`` is handed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdsync.comm.dtypes import dtype_name
from hvdsync.sync.compression.signs import GATHERING, signs_of_bytes


class TorchArrays:
    """See :class:`hvdsync.sync.compression.exchange.Arrays`."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def variable(self, array: np.ndarray, like: Any) -> Any:
        """A tensor to remember, on the device of another."""
        return self._torch.from_numpy(array).to(like.device)

    def assign(self, variable: Any, value: Any) -> Any:
        """What is remembered in place of another."""
        return value

    def counter(self) -> int:
        """A number to count with."""
        return 0

    def like(self, array: np.ndarray, other: Any) -> Any:
        """An array as a tensor, on the device of another."""
        return self.variable(array, other)

    def to_numpy(self, x: Any) -> np.ndarray:
        """A tensor as an array."""
        array: np.ndarray = x.cpu().numpy()
        return array

    def dtype(self, x: Any) -> str:
        return dtype_name(x.dtype)

    def cast(self, x: Any, dtype: str) -> Any:
        return x.to(getattr(self._torch, dtype))

    def divide(self, x: Any, by: Any) -> Any:
        return x / by

    def reshape(self, x: Any, shape: Sequence[Any]) -> Any:
        return x.reshape(shape)

    def concat(self, parts: Sequence[Any]) -> Any:
        return self._torch.cat(list(parts))

    def split(self, x: Any, sizes: Sequence[int]) -> list[Any]:
        return list(x.split(list(sizes)))

    def padded(self, x: Any, multiple: Any) -> Any:
        missing = -len(x) % multiple
        return self._torch.nn.functional.pad(x, (0, missing)) if missing else x

    def to_bytes(self, x: Any) -> Any:
        return x.contiguous().view(self._torch.uint8)

    def from_bytes(self, x: Any, dtype: str) -> Any:
        wanted = getattr(self._torch, dtype)
        # A view of other numbers has to begin where they may.
        aligned = x.storage_offset() % wanted.itemsize == 0
        return (x if aligned else x.clone()).view(wanted)

    def sum_rows(self, x: Any) -> Any:
        return x.sum(0)

    def matmul(self, a: Any, b: Any, *, turn_a: bool = False, turn_b: bool = False) -> Any:
        return (a.T if turn_a else a) @ (b.T if turn_b else b)

    def orthonormal(self, x: Any) -> Any:
        return self._torch.linalg.qr(x).Q

    def zeros_like(self, x: Any) -> Any:
        return self._torch.zeros_like(x)

    def mean(self, x: Any) -> Any:
        return x.mean()

    def zero_or_nan(self, x: Any) -> Any:
        total = x.sum()
        return self._torch.where(total.isfinite(), 0.0, self._torch.nan).to(x)

    def where_at_least(self, x: Any, least: Any) -> Any:
        return (x >= least).nonzero().flatten()

    def length(self, x: Any) -> Any:
        return len(x)

    def top(self, x: Any, count: int) -> Any:
        return x.topk(count, sorted=False).indices

    def lowest(self, x: Any) -> Any:
        return x.min()

    def take(self, x: Any, indices: Any) -> Any:
        return x[indices]

    def put(self, x: Any, indices: Any, value: float) -> Any:
        return x.index_fill(0, indices, value)

    def add_at(self, x: Any, indices: Any, values: Any) -> Any:
        return x.index_add_(0, indices, values)

    def choose(self, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        return then() if condition else otherwise()

    def pack_signs(self, x: Any) -> Any:
        torch = self._torch
        # Eight bytes that are 0 or 1, as one number: a product gathers them in its top byte.
        eights = self.padded((x >= 0).to(torch.uint8), 8).view(torch.int64)
        return ((eights * GATHERING) >> 56).to(torch.uint8)

    def unpack_signs(self, bits: Any, size: int, dtype: str) -> Any:
        table = self._torch.from_numpy(signs_of_bytes(dtype)).to(bits.device)
        # A third of the time that an index in brackets takes.
        return table.index_select(0, bits.to(self._torch.int32)).reshape(-1)[:size]
