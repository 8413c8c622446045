"""The array operations of compressors, for TensorFlow tensors; ``tf`` is handed in.

In eager mode and in graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdsync.comm.dtypes import dtype_name
from hvdsync.sync.compression.signs import GATHERING, signs_of_bytes


class TensorFlowArrays:
    """See :class:`hvdsync.sync.compression.exchange.Arrays`."""

    def __init__(self, tf: Any) -> None:
        self._tf = tf

    def variable(self, array: np.ndarray, like: Any) -> Any:
        """A variable to remember; also while a function is traced."""
        with self._tf.init_scope():
            return self._tf.Variable(array, trainable=False, name="remembered")

    def assign(self, variable: Any, value: Any) -> Any:
        """What is remembered in place of another."""
        variable.assign(value, read_value=False)
        return variable

    def counter(self) -> Any:
        """A number to count with."""
        with self._tf.init_scope():
            return self._tf.Variable(0, dtype=self._tf.int64, trainable=False, name="steps")

    def like(self, array: np.ndarray, other: Any) -> Any:
        """An array, which can be assigned."""
        return array

    def to_numpy(self, x: Any) -> np.ndarray:
        """A variable's value."""
        array: np.ndarray = x.numpy()
        return array

    def dtype(self, x: Any) -> str:
        return dtype_name(x.dtype)

    def cast(self, x: Any, dtype: str) -> Any:
        return self._tf.cast(x, dtype)

    def divide(self, x: Any, by: Any) -> Any:
        return x / self._tf.cast(by, x.dtype)

    def reshape(self, x: Any, shape: Sequence[Any]) -> Any:
        return self._tf.reshape(x, shape)

    def concat(self, parts: Sequence[Any]) -> Any:
        return self._tf.concat(list(parts), 0)

    def split(self, x: Any, sizes: Sequence[int]) -> list[Any]:
        return list(self._tf.split(x, list(sizes)))

    def padded(self, x: Any, multiple: Any) -> Any:
        missing = -self._tf.size(x) % multiple
        return self._tf.pad(x, [[0, missing]])

    def to_bytes(self, x: Any) -> Any:
        return self._tf.reshape(self._tf.bitcast(x, self._tf.uint8), [-1])

    def from_bytes(self, x: Any, dtype: str) -> Any:
        wanted = self._tf.as_dtype(dtype)
        return self._tf.bitcast(self._tf.reshape(x, [-1, wanted.size]), wanted)

    def sum_rows(self, x: Any) -> Any:
        return self._tf.reduce_sum(x, 0)

    def matmul(self, a: Any, b: Any, *, turn_a: bool = False, turn_b: bool = False) -> Any:
        return self._tf.matmul(a, b, transpose_a=turn_a, transpose_b=turn_b)

    def orthonormal(self, x: Any) -> Any:
        return self._tf.linalg.qr(x)[0]

    def zeros_like(self, x: Any) -> Any:
        return self._tf.zeros_like(x)

    def mean(self, x: Any) -> Any:
        return self._tf.reduce_mean(x)

    def zero_or_nan(self, x: Any) -> Any:
        tf = self._tf
        is_finite = tf.math.is_finite(tf.reduce_sum(x))
        return tf.where(is_finite, tf.zeros([], x.dtype), tf.constant(np.nan, x.dtype))

    def where_at_least(self, x: Any, least: Any) -> Any:
        return self._tf.reshape(self._tf.where(x >= least), [-1])

    def length(self, x: Any) -> Any:
        return self._tf.size(x)

    def top(self, x: Any, count: int) -> Any:
        return self._tf.cast(self._tf.math.top_k(x, count, sorted=False).indices, self._tf.int64)

    def lowest(self, x: Any) -> Any:
        return self._tf.reduce_min(x)

    def take(self, x: Any, indices: Any) -> Any:
        return self._tf.gather(x, indices)

    def put(self, x: Any, indices: Any, value: float) -> Any:
        tf = self._tf
        values = tf.fill(tf.shape(indices), tf.cast(value, x.dtype))
        return tf.tensor_scatter_nd_update(x, indices[:, None], values)

    def add_at(self, x: Any, indices: Any, values: Any) -> Any:
        return self._tf.tensor_scatter_nd_add(x, indices[:, None], values)

    def choose(self, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        return self._tf.cond(condition, then, otherwise)

    def pack_signs(self, x: Any) -> Any:
        tf = self._tf
        # Eight bytes that are 0 or 1, as one number: a product gathers them in its top byte.
        bits = tf.reshape(self.padded(tf.cast(x >= 0, tf.uint8), 8), [-1, 8])
        eights = tf.bitcast(bits, tf.int64)
        return tf.cast(tf.bitwise.right_shift(eights * GATHERING, 56) & 255, tf.uint8)

    def unpack_signs(self, bits: Any, size: int, dtype: str) -> Any:
        tf = self._tf
        table = tf.constant(signs_of_bytes(dtype))
        return tf.reshape(tf.gather(table, tf.cast(bits, tf.int32)), [-1])[:size]
