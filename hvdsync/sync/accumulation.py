"""Several backward passes for one optimizer step: gradients go in, their sum comes out at the last.

Stands for Horovod's ``backward_passes_per_step``; nothing travels before the sum is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class GraphAccumulation:
    """Sums TensorFlow gradients over ``passes`` calls, in eager mode and inside ``tf.function``.

    Sparse gradients are added up densely. With ``average`` the sum is divided by ``passes``.
    """

    def __init__(self, tf: ModuleType, passes: int, average: bool) -> None:
        self._tf = tf
        self._passes = passes
        self._average = average
        self._counter: Any = None
        self._sums: list[Any] = []

    def apply(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        update: Callable[[Sequence[Any]], None],
    ) -> None:
        """Add gradients; each ``passes``-th call runs ``update`` with the sums."""
        tf = self._tf
        if self._counter is None:
            self._make_variables(variables)
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        count = self._counter.assign_add(1)

        def finish() -> Any:
            sums = [
                None if gradient is None else total.read_value()
                for total, gradient in zip(self._sums, gradients, strict=True)
            ]
            if self._average:
                sums = [None if s is None else s / self._passes for s in sums]
            update(sums)
            for total in self._sums:
                total.assign(tf.zeros_like(total))
            return self._counter.assign(0)

        tf.cond(tf.equal(count, self._passes), finish, lambda: tf.identity(count))

    def _make_variables(self, variables: Sequence[Any]) -> None:
        tf = self._tf
        with tf.init_scope():
            self._sums = [
                tf.Variable(tf.zeros(v.shape, v.dtype), trainable=False) for v in variables
            ]
            self._counter = tf.Variable(0, dtype=tf.int64, trainable=False)


class ListAccumulation:
    """Sums PyTorch gradients over ``passes`` calls; with ``average`` divides by ``passes``."""

    def __init__(self, passes: int, average: bool) -> None:
        self._passes = passes
        self._average = average
        self._count = 0
        self._sums: list[Any] = []

    def apply(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        update: Callable[[Sequence[Any]], None],
    ) -> None:
        """Add gradients; each ``passes``-th call runs ``update`` with the sums."""
        if self._count == 0:
            self._sums = [None if g is None else g.detach().clone() for g in gradients]
        else:
            for i, gradient in enumerate(gradients):
                if gradient is None:
                    continue
                if self._sums[i] is None:
                    self._sums[i] = gradient.detach().clone()
                else:
                    self._sums[i].add_(gradient.detach())
        self._count += 1
        if self._count < self._passes:
            return
        if self._average:
            self._sums = [None if s is None else s.div_(self._passes) for s in self._sums]
        update(self._sums)
        self._count, self._sums = 0, []
