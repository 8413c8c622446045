"""Gradients of TensorFlow, looked at before they travel: tensors in, a verdict on the update out.

Works in eager mode and inside ``tf.function``; ``tf`` and ``hvd`` are handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdsync.comm import verbs
from hvdsync.guard import nonfinite
from hvdsync.guard.fingerprints import kind_of
from hvdsync.guard.guard import Guard
from hvdsync.guard.keras_input import input_of_train_step
from hvdsync.sync.tensorflow_gradients import checksum_of, name_of


class Look:
    """What this rank sees of ``count`` gradients on their way, as parts of a graph.

    A tensor is read once: half the square of its norm is within its limit only if no element is NaN
    or infinite and no sum of ranks' elements can overflow. Otherwise its parts are counted.
    """

    def __init__(self, tf: ModuleType, count: int, bad_loss: Any) -> None:
        self._tf = tf
        self._flags = [bad_loss]
        self._rows: list[Any] = [tf.zeros([2], tf.int64)] * count

    def at(
        self,
        indices: Sequence[int],
        tensors: Sequence[Any],
        sizes: Sequence[int] | None = None,
        largest: Any = None,
    ) -> None:
        """Look at the gradients ``indices``: ``tensors``, or one flat tensor of parts ``sizes``.

        ``largest`` is a norm below which nothing can overflow on the wire; by default that of the
        dtype.
        """
        tf = self._tf
        suspect = tf.reduce_any([self._is_suspect(tensor, largest) for tensor in tensors])

        def counted() -> Any:
            parts = tensors if sizes is None else tf.split(tensors[0], list(sizes))
            return tf.stack([_count(tf, part) for part in parts])

        table = tf.cond(suspect, counted, lambda: tf.zeros([len(indices), 2], tf.int64))
        for i, row in zip(indices, tf.unstack(table, len(indices)), strict=True):
            self._rows[i] = row
        self._flags.append(suspect)

    @property
    def flag(self) -> Any:
        """Whether anything so far may not be finite."""
        return self._tf.reduce_any(self._flags)

    @property
    def table(self) -> Any:
        """NaN and infinite elements of each gradient, int64 (count, 2)."""
        return self._tf.stack(self._rows)

    def _is_suspect(self, tensor: Any, largest: Any) -> Any:
        tf = self._tf
        if tensor.dtype.is_complex:
            tensor = tf.abs(tensor)
        if tensor.dtype.size < 4:
            tensor = tf.cast(tensor, tf.float32)
        half_square = tf.nn.l2_loss(tensor)
        if largest is None:
            return ~tf.math.is_finite(half_square)
        return ~(half_square <= tf.cast(largest * largest / 2, half_square.dtype))


class GraphVerdict:
    """What all ranks make of one optimizer's gradients, before each update.

    On the wire: one flag with the last bucket of gradients and, in a step in which it is set, one
    all-gather of 24 bytes per gradient and rank.
    """

    def __init__(self, tf: ModuleType, hvd: ModuleType, guard: Guard) -> None:
        self.guard = guard
        self._tf = tf
        self._hvd = hvd

    def run(
        self,
        optimizer: Any,
        sharing: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        update: Callable[[Sequence[Any]], Any],
    ) -> None:
        """Reduce gradients, and call ``update`` with them unless the guard is against it.

        Raises :class:`NonFiniteGradient` on every rank; out of a ``tf.function`` TensorFlow makes
        its own error of it, with the same text, unless the guard's callback raises it.
        """
        tf = self._tf
        bad_loss = self._has_bad_loss()
        # An error in a graph keeps back what depends on it. To choose in the graph costs up to a
        # tenth of a step of many small tensors, so it is done only where the graph goes on.
        raises_later = self.guard._raises_later and not tf.executing_eagerly()
        goes_on = raises_later or self.guard.on_nonfinite == "skip"
        reduced, flag, table = sharing.reducer.reduce_and_look(
            gradients, variables, bad_loss, local=sharing.local, scale_local=sharing.scale_local
        )

        def judged() -> Any:
            rows = self._rows(sharing.reducer, variables, reduced, table, bad_loss)
            judge = self._judge(variables, raises_later)
            step = tf.cast(optimizer.iterations, tf.int64) + 1
            verdict = tf.numpy_function(judge, [rows, step], tf.bool)
            return tf.ensure_shape(verdict, [])

        def updated() -> Any:
            update(reduced)
            return tf.constant(True)

        to_be_applied = tf.cond(flag, judged, lambda: tf.constant(True))
        if goes_on:
            tf.cond(to_be_applied, updated, lambda: tf.constant(False))
        else:
            with tf.control_dependencies([to_be_applied]):
                update(reduced)
        self.guard._forget()

    def _judge(self, variables: Sequence[Any], raises_later: bool) -> Callable[..., Any]:
        watched = [nonfinite.Watched(name_of(v), kind_of(v), math.prod(v.shape)) for v in variables]
        guard_judges = self.guard._judge_and_keep if raises_later else self.guard._judge

        def judge(rows: np.ndarray, step: np.ndarray) -> np.ndarray:
            return np.array(guard_judges(rows, watched, int(step)))

        return judge

    def _rows(
        self, reducer: Any, variables: Sequence[Any], reduced: Sequence[Any], table: Any, loss: Any
    ) -> Any:
        tf, hvd = self._tf, self._hvd
        seen, nan, inf = self._count_input()
        rank = hvd.rank_op() if reducer.active else verbs.rank()
        header = [rank, int(seen), nan, inf, loss]
        zero = tf.zeros([2], tf.int64)
        after = [
            zero if gradient is None else _count(tf, getattr(gradient, "values", gradient))
            for gradient in reduced
        ]
        columns = tf.concat([table, tf.reduce_sum(tf.stack(after), 1, keepdims=True)], 1)
        start = tf.stack([tf.cast(number, tf.int64) for number in header])
        row = tf.concat([start, tf.reshape(columns, [-1])], 0)[None]
        if not reducer.active:
            return row
        name = f"{reducer.name}.{checksum_of(variables)}.nonfinite"
        return hvd.allgather(
            row, name=name, ignore_name_scope=True, process_set=reducer.process_set
        )

    def _count_input(self) -> tuple[bool, Any, Any]:
        tf = self._tf
        batches = list(self.guard._batches) or input_of_train_step()
        tensors = [t for t in tf.nest.flatten(batches) if self._is_of_this_step(t)]
        if not tensors:
            return False, 0, 0
        counts = tf.add_n([_count(tf, tensor) for tensor in tensors])
        return True, counts[0], counts[1]

    def _has_bad_loss(self) -> Any:
        tf = self._tf
        losses = [loss for loss in self.guard._losses if self._is_of_this_step(loss)]
        if not losses:
            return tf.constant(False)
        return tf.reduce_any([tf.reduce_any(~tf.math.is_finite(loss)) for loss in losses])

    def _is_of_this_step(self, value: Any) -> bool:
        """Whether it can be read here: not of another graph, and no constant of an earlier call."""
        tf = self._tf
        if tf.executing_eagerly():
            return not tf.is_symbolic_tensor(value) and hasattr(value, "dtype")
        if not tf.is_symbolic_tensor(value):
            return False
        graph = tf.compat.v1.get_default_graph()
        while graph is not None and graph is not value.graph:
            graph = getattr(graph, "outer_graph", None)
        return graph is not None


def judge_meeting(
    tf: ModuleType,
    guard: Guard,
    reducer: Any,
    label: str,
    variables: Sequence[Any],
    own: Sequence[Any],
    met: Sequence[Any],
    step: Any,
) -> Any:
    """Whether what comes of ranks' variables when replicas meet is to be used, as part of a graph.

    See :func:`hvdsync.guard.torch_nonfinite.judge_meeting`.
    """
    watched = [nonfinite.Watched(name_of(v), kind_of(v), math.prod(v.shape)) for v in variables]

    def judge(rows: np.ndarray, step: np.ndarray) -> np.ndarray:
        return np.array(guard._judge_meeting_and_keep(rows, watched, int(step)))

    def judged() -> Any:
        counts = [tf.stack([_count(tf, tensor) for tensor in tensors]) for tensors in (own, met)]
        after = tf.reduce_sum(counts[1], 1, keepdims=True)
        columns = tf.reshape(tf.concat([counts[0], after], 1), [-1])
        header = tf.constant([verbs.rank(), 0, 0, 0, 0], tf.int64)
        row = tf.concat([header, columns], 0)[None]
        rows = reducer.gather(row, f"{label}.nonfinite") if reducer.active else row
        return tf.ensure_shape(tf.numpy_function(judge, [rows, step], tf.bool), [])

    bad = [_count(tf, tensor) for tensor in met]
    return tf.cond(tf.reduce_any(tf.stack(bad) > 0), judged, lambda: tf.constant(True))


def _count(tf: ModuleType, tensor: Any) -> Any:
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype.is_complex:
        tensor = tf.abs(tensor)
    if not tensor.dtype.is_floating:
        return tf.zeros([2], tf.int64)
    found = tf.math.is_nan(tensor), tf.math.is_inf(tensor)
    return tf.stack([tf.math.count_nonzero(kind, dtype=tf.int64) for kind in found])
