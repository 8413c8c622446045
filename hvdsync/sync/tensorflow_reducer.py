"""TensorFlow gradients of this rank go in, reduced gradients of all ranks come out.

Works in eager mode and inside ``tf.function``; TensorFlow and Horovod are handed in.
"""

from __future__ import annotations

import re
import sys
import weakref
import zlib
from collections.abc import Callable, Collection, Hashable, Sequence
from types import ModuleType
from typing import Any

from hvdsync.comm import launch, world
from hvdsync.errors import HvdsyncError
from hvdsync.sync.buckets import DEFAULT_FIRST_BYTES, DEFAULT_LIMIT_BYTES, plan_buckets

# How often each label was used in a graph so far. A second use in one graph (two calls of
# gradient() on a persistent tape) may be in flight beside the first and needs another name; a
# retraced function is a new graph and gets the old names again.
_uses: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def variable_of(source: Any) -> Any:
    """The ``tf.Variable`` (or tensor) behind a ``keras.Variable``; anything else as it is."""
    # Only a Keras variable has a path; its own attribute is taken because `.value` may be cast.
    return source._value if hasattr(source, "path") and hasattr(source, "_value") else source


def name_of(source: Any) -> str:
    """A name that is equal on all ranks: the path of a Keras variable, or the TensorFlow name."""
    return str(getattr(source, "path", None) or getattr(source, "name", None) or "tensor")


def key_of(source: Any) -> Hashable:
    """A hashable identity of a variable or tensor."""
    return variable_of(source).ref()


class GraphReducer:
    """Reduces lists of gradients over ranks in flat buckets, one collective each.

    Gradients are taken in reverse order of their sources, since backward produces them so, packed
    by dtype into flat tensors (see :func:`hvdsync.sync.buckets.plan_buckets`), compressed, reduced
    by Horovod and unpacked. ``tf.IndexedSlices`` travel as two all-gathers (or densely, with
    ``sparse_as_dense``). None stays None. With one rank the very same list comes back.

    Collectives are named after ``name`` and a checksum of the sources' names and shapes, never by
    a global counter, so that retracing changes no name and two wrappers do not share one.

    ``op`` is one of ``hvd.Average``, ``hvd.Sum``, ``hvd.Adasum``, ...;
    ``gradient_predivide_factor`` splits an average before and after the sum as in
    Horovod. ``groups`` is a number of groups or lists of sources that travel together.
    """

    def __init__(
        self,
        tf: ModuleType,
        hvd: ModuleType,
        name: str,
        *,
        compression: Any,
        op: Any,
        gradient_predivide_factor: float = 1.0,
        process_set: Any = None,
        sparse_as_dense: bool = False,
        groups: int | Sequence[Sequence[Any]] | None = None,
        limit_bytes: int = DEFAULT_LIMIT_BYTES,
        first_bytes: int | None = DEFAULT_FIRST_BYTES,
    ) -> None:
        self._tf = tf
        self._hvd = hvd
        self.name = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
        self._compression = compression
        self._op = op
        self._predivide = gradient_predivide_factor
        self.process_set = hvd.global_process_set if process_set is None else process_set
        self._sparse_as_dense = sparse_as_dense
        self._groups = (
            groups
            if groups is None or isinstance(groups, int)
            else [[key_of(source) for source in group] for group in groups]
        )
        # Adasum weighs each tensor by its own norm: fused tensors would share one weight.
        self._limit_bytes = 0 if op == hvd.Adasum else limit_bytes
        self._first_bytes = None if op == hvd.Adasum else first_bytes
        self._eager: dict[Hashable, Callable[..., Any]] = {}
        self._waited: Any = None

    @property
    def waited_seconds(self) -> float:
        """Seconds between the last local gradient and the last reduced one, over all steps.

        That is communication which no computation hid. Gradients are not held back to measure it.
        """
        return 0.0 if self._waited is None else float(self._waited.numpy())

    @property
    def active(self) -> bool:
        """Whether anything travels: more than one rank in the process set, and this one in it."""
        if not world.is_active():
            world.current()  # raises when a launcher started several ranks
            return False
        started = launch.detect()
        if started is not None and started.elastic:
            # A graph outlives a change of the world's size, so it holds the collectives always.
            return True
        return bool(self.process_set.included()) and self.process_set.size() > 1

    def reduce(
        self,
        gradients: Sequence[Any],
        sources: Sequence[Any],
        *,
        local: Collection[Hashable] = (),
        scale_local: bool = True,
    ) -> list[Any]:
        """Reduced gradients, in the order and structure given.

        ``sources`` are the variables (Keras or TensorFlow) that the gradients belong to. Sources
        whose :func:`key_of` is in ``local`` keep their own gradient, divided by the number of
        ranks when ``scale_local``, so that their step matches that of averaged ones.
        """
        gradients = list(gradients)
        if not self.active or all(gradient is None for gradient in gradients):
            return gradients
        tf = self._tf
        names = tuple(name_of(s) for s in sources)
        keys = [key_of(s) for s in sources]
        is_local = tuple(key in local for key in keys)
        groups = self._group_positions(keys)
        if not tf.executing_eagerly():
            return self._in_graph(gradients, names, is_local, scale_local, groups)
        # In eager mode one op waits for the one before it; a function runs them all at once.
        signature = (names, is_local, scale_local, groups)
        function = self._eager.get(signature)
        if function is None:
            function = tf.function(
                lambda grads: self._in_graph(grads, names, is_local, scale_local, groups),
                reduce_retracing=True,
                autograph=False,
            )
            self._eager[signature] = function
        return list(function(gradients))

    def key(self, variable: Any) -> Hashable:
        """Identity of a variable, as ``local`` of :meth:`reduce` takes it."""
        return key_of(variable)

    def check_compiled(self, optimizer: Any) -> None:
        """Nothing: graphs are checked where collectives are put into them."""

    def _group_positions(self, keys: Sequence[Hashable]) -> tuple[tuple[int, ...], ...] | None:
        if self._groups is None:
            return None
        if isinstance(self._groups, int):
            count, length = min(self._groups, len(keys)), len(keys)
            ends = [length * (i + 1) // count for i in range(count)]
            starts = [0, *ends[:-1]]
            return tuple(tuple(range(a, b)) for a, b in zip(starts, ends, strict=True))
        where = {key: i for i, key in enumerate(keys)}
        return tuple(tuple(where[k] for k in group if k in where) for group in self._groups)

    def _in_graph(
        self,
        gradients: Sequence[Any],
        names: tuple[str, ...],
        is_local: tuple[bool, ...],
        scale_local: bool,
        groups: tuple[tuple[int, ...], ...] | None,
    ) -> list[Any]:
        tf = self._tf
        _refuse_xla(self.name)
        result = list(gradients)
        dense: list[int] = []
        sparse: list[int] = []
        for i in reversed(range(len(result))):
            if result[i] is None:
                continue
            if is_local[i]:
                result[i] = self._divide(result[i]) if scale_local else result[i]
            elif not isinstance(result[i], tf.IndexedSlices):
                dense.append(i)
            elif self._sparse_as_dense:
                result[i] = tf.convert_to_tensor(result[i])
                dense.append(i)
            else:
                sparse.append(i)
        before = [_tensor(result[i]) for i in (*dense, *sparse)]
        label = self._label(names, gradients)
        for i in sparse:
            result[i] = self._gather(result[i], f"{label}.sparse{i}")
        self._reduce_dense(result, dense, groups, label)
        self._count_waiting(before, [_tensor(result[i]) for i in (*dense, *sparse)])
        return result

    def _label(self, names: tuple[str, ...], gradients: Sequence[Any]) -> str:
        shapes = ["" if g is None else str(g.shape) for g in gradients]
        graph = self._tf.compat.v1.get_default_graph()
        # What is None on one rank only must meet the other ranks under one name, to be refused
        # by Horovod with both shapes; so gradients that are missing leave the checksum alone.
        parts = [n if n != "tensor" else n + s for n, s in zip(names, shapes, strict=True)]
        label = f"{self.name}.{zlib.crc32(chr(0).join(parts).encode()):08x}"
        uses = _uses.setdefault(graph, {})
        uses[label] = uses.get(label, -1) + 1
        return f"{label}.{uses[label]}" if uses[label] else label

    def _reduce_dense(
        self,
        result: list[Any],
        dense: list[int],
        groups: tuple[tuple[int, ...], ...] | None,
        label: str,
    ) -> None:
        known = [i for i in dense if result[i].shape.is_fully_defined()]
        place = {i: p for p, i in enumerate(known)}
        plan = plan_buckets(
            [result[i].shape.num_elements() for i in known],
            [result[i].dtype.name for i in known],
            limit_bytes=self._limit_bytes,
            first_bytes=self._first_bytes,
            groups=groups and [[place[i] for i in group if i in place] for group in groups],
        )
        tf = self._tf
        for number, bucket in enumerate(plan):
            members = [known[p] for p in bucket.members]
            name = f"{label}.bucket{number}"
            if len(members) == 1:
                result[members[0]] = self._travel(result[members[0]], name)
                continue
            flat = tf.concat([tf.reshape(result[i], [-1]) for i in members], 0)
            parts = tf.split(self._travel(flat, name), list(bucket.sizes))
            for i, part in zip(members, parts, strict=True):
                result[i] = tf.reshape(part, result[i].shape)
        for i in set(dense) - set(known):
            result[i] = self._travel(result[i], f"{label}.dynamic{i}")

    def _travel(self, flat: Any, name: str) -> Any:
        wire, ctx = self._compression.compress(flat)
        reduced = allreduce(
            self._tf,
            self._hvd,
            wire,
            name,
            op=self._op,
            predivide=self._predivide,
            process_set=self.process_set,
        )
        return self._compression.decompress(reduced, ctx)

    def _gather(self, slices: Any, name: str) -> Any:
        hvd, tf = self._hvd, self._tf
        if self._op not in (hvd.Average, hvd.Sum):
            raise NotImplementedError(
                f"{self.name}: sparse gradients can be summed or averaged only; give "
                "sparse_as_dense=True for other reductions"
            )
        options = {"ignore_name_scope": True, "process_set": self.process_set}
        values = hvd.allgather(slices.values, name=f"{name}.values", **options)
        indices = hvd.allgather(slices.indices, name=f"{name}.indices", **options)
        gathered = tf.IndexedSlices(values, indices, slices.dense_shape)
        return self._divide(gathered) if self._op == hvd.Average else gathered

    def _divide(self, gradient: Any) -> Any:
        tf = self._tf
        ranks = self._hvd.size_op(process_set_id=self.process_set.process_set_id)
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(ranks, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(ranks, gradient.dtype)

    def _count_waiting(self, before: list[Any], after: list[Any]) -> None:
        tf = self._tf
        if not tf.compat.v1.executing_eagerly_outside_functions() or not after:
            return  # a graph of TensorFlow 1 would not run it
        if self._waited is None:
            with tf.init_scope():
                self._waited = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="waited")
        with tf.control_dependencies(before):
            start = tf.timestamp()
        with tf.control_dependencies(after):
            end = tf.timestamp()
        self._waited.assign_add(tf.maximum(end - start, 0.0))


def _refuse_xla(name: str) -> None:
    """Raise while a function with ``jit_compile=True`` is traced: XLA has no such collective.

    TensorFlow would say so too, at run time and in terms of kernels; nothing but the call stack
    tells which functions are being traced.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        function = frame.f_locals.get("self")
        if getattr(function, "_jit_compile", None) is True and hasattr(function, "python_function"):
            raise HvdsyncError(
                f"{name}: gradients are reduced inside a tf.function with jit_compile=True, where "
                "XLA has no kernel for Horovod's collectives. Leave jit_compile out of the "
                "function that applies gradients (what it calls may be compiled); in Keras give "
                "fit() a callback of hvdsync.keras.callbacks, which does so, or "
                "compile(jit_compile=False)"
            )
        frame = frame.f_back


def _tensor(gradient: Any) -> Any:
    return gradient.values if hasattr(gradient, "values") else gradient


def allreduce(
    tf: ModuleType,
    hvd: ModuleType,
    tensor: Any,
    name: str | None,
    *,
    op: Any,
    predivide: float = 1.0,
    process_set: Any,
) -> Any:
    """Horovod's all-reduce under exactly this name, whatever scopes surround it.

    bfloat16, which Horovod does not know, travels as float32.
    """
    narrow = tensor.dtype == tf.bfloat16
    reduced = hvd.allreduce(
        tf.cast(tensor, tf.float32) if narrow else tensor,
        op=op,
        prescale_factor=1.0 / predivide,
        postscale_factor=predivide,
        name=name,
        process_set=process_set,
        ignore_name_scope=True,
    )
    return tf.cast(reduced, tf.bfloat16) if narrow else reduced
