"""TensorFlow gradients of this rank go in, reduced gradients of all ranks come out.

Works in eager mode and inside ``tf.function``; TensorFlow and Horovod are handed in.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from hvdsync.comm import clock, failures, launch, world
from hvdsync.errors import HvdsyncError
from hvdsync.guard.tensorflow_nonfinite import Look
from hvdsync.sync.buckets import (
    DEFAULT_FIRST_BYTES,
    DEFAULT_LIMIT_BYTES,
    group_positions,
    plan_buckets,
)
from hvdsync.sync.compression.exchange import BucketCompressor, Part
from hvdsync.sync.compression.memory import Memory
from hvdsync.sync.tensorflow_exchange import Exchanges, allreduce, bytes_of
from hvdsync.sync.tensorflow_gradients import (
    GradientKinds,
    checksum_of,
    kept_from_folding,
    key_of,
    variable_of,
)
from hvdsync.sync.tensorflow_host_sum import HostSums

# How often each label was used in a graph so far. A second use in one graph (two calls of
# gradient() on a persistent tape) may be in flight beside the first and needs another name; a
# retraced function is a new graph and gets the old names again.
_uses: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


class GraphReducer:
    """Reduces lists of gradients over ranks in flat buckets, one collective each.

    Gradients are taken in reverse order of their sources, since backward produces them so, packed
    by dtype into flat tensors (see :func:`hvdsync.sync.buckets.plan_buckets`), compressed, reduced
    by Horovod and unpacked. ``tf.IndexedSlices`` travel as two all-gathers (or densely, with
    ``sparse_as_dense``). With one rank the very same list comes back.

    A gradient that is None on every rank stays None; one that is None on some counts as zero there
    (see :class:`hvdsync.sync.tensorflow_gradients.GradientKinds`).

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
        self._groups = (
            groups
            if groups is None or isinstance(groups, int)
            else [[key_of(source) for source in group] for group in groups]
        )
        # Adasum weighs each tensor by its own norm: fused tensors would share one weight.
        self._limit_bytes = 0 if op == hvd.Adasum else limit_bytes
        self._first_bytes = None if op == hvd.Adasum else first_bytes
        self._eager: dict[Hashable, Callable[..., Any]] = {}
        self._kinds = GradientKinds(tf, hvd, self.process_set, sparse_as_dense)
        self._waited: Any = None
        self._sent: Any = None
        self._sent_by_graph: list[Any] = []
        self._exchanges: Exchanges | None = None
        if isinstance(compression, BucketCompressor) and op in (hvd.Average, hvd.Sum):
            self._exchanges = Exchanges(tf, hvd, compression, self.process_set)
        self._host_sums = HostSums(tf, hvd, averages=op == hvd.Average)
        # There is nothing for AutoGraph to convert, which takes it seconds.
        self._unconverted = tf.autograph.experimental.do_not_convert(self._reduce)
        clock.include(self)
        # Weak: a tape's reducer outlives the variables that were trained.
        self._last: tuple[list[weakref.ref[Any]], bool] | None = None
        self._without_gradients: dict[Hashable, Callable[[], Any]] = {}
        self._is_silent = False

    @property
    def waited_seconds(self) -> float:
        """Seconds between the last local gradient and the last reduced one, over all steps.

        That is communication which no computation hid. Gradients are not held back to measure it.
        """
        on_host = self._host_sums.waited_seconds
        if self._waited is None:
            return on_host
        # Asked at every step; the variable's own way takes five times as long.
        read = self._tf.raw_ops.ReadVariableOp
        timed = float(read(resource=self._waited.handle, dtype=self._tf.float64).numpy())
        return on_host + timed

    @property
    def memory(self) -> Memory | None:
        """What a compressor remembers of the gradients; None where there is no such compressor."""
        return None if self._exchanges is None else self._exchanges.memory

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has given to collectives of gradients so far."""
        return 0 if self._sent is None else int(self._sent.numpy())

    @property
    def active(self) -> bool:
        """Whether anything travels: more than one rank in the process set, and this one in it."""
        if self._is_silent:
            return False
        if not world.is_active():
            world.current()  # raises when a launcher started several ranks
            return False
        if launch.is_elastic():
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
        if not self.active or not gradients:
            return gradients
        return list(self._unconverted(gradients, sources, local, scale_local, None))

    def reduce_and_look(
        self,
        gradients: Sequence[Any],
        sources: Sequence[Any],
        bad_loss: Any,
        *,
        local: Collection[Hashable] = (),
        scale_local: bool = True,
    ) -> tuple[list[Any], Any, Any]:
        """As :meth:`reduce`, and what was seen of the gradients before they were reduced.

        That is: whether any of those of any rank, or the loss of any (``bad_loss``, a boolean), may
        not be finite, and how many elements of each of this rank's are NaN and infinite, as int64
        (N, 2). The first travels with the gradients.
        """
        gradients = list(gradients)
        if not self.active or not gradients:
            if not self._tf.executing_eagerly():
                _refuse_xla(self.name)
            look = Look(self._tf, len(gradients), bad_loss)
            there = [i for i, gradient in enumerate(gradients) if gradient is not None]
            if there:
                look.at(there, [_tensor(gradients[i]) for i in there])
            return gradients, look.flag, look.table
        *reduced, flag, table = self._unconverted(gradients, sources, local, scale_local, bad_loss)
        return reduced, flag, table

    def _reduce(
        self,
        gradients: list[Any],
        sources: Sequence[Any],
        local: Collection[Hashable],
        scale_local: bool,
        bad_loss: Any,
    ) -> list[Any]:
        tf = self._tf
        keys = [key_of(s) for s in sources]
        is_local = tuple(key in local for key in keys)
        groups = group_positions(self._groups, keys)
        eager = tf.executing_eagerly()
        self._last = [weakref.ref(source) for source in sources], eager
        label = f"{self.name}.{checksum_of(sources)}"
        if not eager:
            label = _numbered(tf, label)
        gradients = self._kinds.agree(label, gradients, sources, is_local)
        if not eager:
            return self._in_graph(gradients, label, is_local, scale_local, groups, bad_loss)
        # In eager mode one op waits for the one before it; a function runs them all at once.
        signature: tuple[Hashable, ...] = (label, is_local, scale_local, groups)
        if self._exchanges is not None:
            # What is remembered is of these variables; there may be others of the same names.
            signature += tuple(id(variable_of(source)) for source in sources)
        function = self._eager.get(signature)
        if function is None:
            function = tf.function(
                lambda grads, bad: self._in_graph(grads, label, is_local, scale_local, groups, bad),
                reduce_retracing=True,
                autograph=False,
            )
            self._eager[signature] = function
        with failures.explained():
            return list(function(gradients, bad_loss))

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Context in which gradients are reduced over this rank alone, and nothing travels."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def average(self, tensors: Sequence[Any], sources: Sequence[Any], label: str) -> list[Any]:
        """The reduced tensors, one for each of ``sources``; in a graph.

        ``label`` is the name of this exchange in the graph. All ranks have tensors of equal shapes.
        """
        result = list(tensors)
        if self.active:
            _refuse_xla(self.name)
            order = list(reversed(range(len(result))))
            _, over_horovod = self._reduce_dense(result, order, None, f"{self.name}.{label}", None)
            self._count_waiting(*([of[i] for i in over_horovod] for of in (tensors, result)))
        return result

    def gather(self, tensor: Any, label: str) -> Any:
        """The tensors of all ranks, concatenated along axis 0; in a graph."""
        return self._hvd.allgather(
            kept_from_folding(self._tf, tensor),
            name=f"{self.name}.{label}",
            ignore_name_scope=True,
            process_set=self.process_set,
        )

    def key(self, variable: Any) -> Hashable:
        """Identity of a variable, as ``local`` of :meth:`reduce` takes it."""
        return key_of(variable)

    def repeat_with_nothing(self, apply: Callable[[list[None], list[Any]], Any]) -> None:
        """Take part in a reduction like this rank's last one, without gradients of its own.

        ``apply(gradients, sources)`` must call :meth:`reduce` once with them, and runs in a graph
        if the last one did. The other ranks have gradients.
        """
        assert self._last is not None
        references, eager = self._last
        sources = [reference() for reference in references]
        if eager:
            apply([None] * len(sources), sources)
            return
        key = tuple(key_of(source) for source in sources)
        function = self._without_gradients.get(key)
        if function is None:
            function = self._tf.function(
                lambda: apply([None] * len(sources), sources), autograph=False
            )
            self._without_gradients[key] = function
        self._kinds.asks_nothing = True
        try:
            function()
        finally:
            self._kinds.asks_nothing = False

    @staticmethod
    def outside_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        """The function itself: graphs are checked where collectives are put into them."""
        return function

    def _in_graph(
        self,
        gradients: Sequence[Any],
        label: str,
        is_local: tuple[bool, ...],
        scale_local: bool,
        groups: tuple[tuple[int, ...], ...] | None,
        bad_loss: Any,
    ) -> list[Any]:
        """The reduced gradients; behind them what was seen of them, unless ``bad_loss`` is None."""
        tf = self._tf
        _refuse_xla(self.name)
        self._sent_by_graph = []
        if self._exchanges is not None:
            assert self._last is not None
            self._exchanges.begin(label, self._last[0])
        look = None if bad_loss is None else Look(tf, len(gradients), bad_loss)
        result = list(gradients)
        dense: list[int] = []
        sparse: list[int] = []
        for i in reversed(range(len(result))):
            if result[i] is None:
                continue
            if look is not None and (is_local[i] or isinstance(result[i], tf.IndexedSlices)):
                look.at([i], [_tensor(result[i])])
            if is_local[i]:
                result[i] = self._divide(result[i]) if scale_local else result[i]
            elif isinstance(result[i], tf.IndexedSlices):
                sparse.append(i)
            else:
                dense.append(i)
        before = {i: _tensor(result[i]) for i in (*dense, *sparse)}
        for i in sparse:
            result[i] = self._gather(result[i], f"{label}.sparse{i}")
        flag, over_horovod = self._reduce_dense(result, dense, groups, label, look)
        if self._exchanges is not None:
            self._exchanges.end()
        timed = [*over_horovod, *sparse]
        self._count_waiting([before[i] for i in timed], [_tensor(result[i]) for i in timed])
        self._count_bytes()
        return result if look is None else [*result, flag, look.table]

    def _reduce_dense(
        self,
        result: list[Any],
        dense: list[int],
        groups: tuple[tuple[int, ...], ...] | None,
        label: str,
        look: Look | None,
    ) -> tuple[Any, list[int]]:
        """Put reduced tensors into ``result``.

        Gives the flag of all ranks' looks, if there is one: it travels behind the gradients of one
        bucket, of which the other looks are had before. And which tensors went over Horovod: for
        the others the time in which ranks waited is counted already.
        """
        tf = self._tf
        known = [i for i in dense if result[i].shape.is_fully_defined()]
        dynamic = [i for i in dense if not result[i].shape.is_fully_defined()]
        for i in dynamic:
            if look is not None:
                look.at([i], [result[i]], largest=self._largest(result[i]))
            arrived = self._travel(tf.reshape(result[i], [-1]), f"{label}.dynamic{i}")
            result[i] = tf.reshape(arrived, tf.shape(result[i]))
        flag_like = [] if look is None else [tf.zeros([], result[i].dtype) for i in known[:1]]
        total = self._host_sum_of(label, [*(result[i] for i in known), *flag_like])
        if total is not None:
            return self._reduce_on_host(total, result, known, look), dynamic
        place = {i: p for p, i in enumerate(known)}
        plan = plan_buckets(
            [result[i].shape.num_elements() for i in known],
            [result[i].dtype.name for i in known],
            limit_bytes=self._limit_bytes,
            first_bytes=self._first_bytes,
            groups=groups and [[place[i] for i in group if i in place] for group in groups],
        )
        packed = [number for number, bucket in enumerate(plan) if len(bucket.members) > 1]
        carrier = packed[-1] if packed and look is not None else None
        flag = None
        for number in sorted(range(len(plan)), key=lambda number: number == carrier):
            members = [known[p] for p in plan[number].members]
            parts, sizes = [result[i] for i in members], list(plan[number].sizes)
            described = self._parts(label, members, parts)
            if number == carrier:
                assert look is not None
                look.at(members, parts, largest=self._largest(parts[0]))
                parts.append(tf.cast(look.flag, parts[0].dtype))
                sizes.append(1)
            flat = tf.concat([tf.reshape(part, [-1]) for part in parts], 0)
            if look is not None and number != carrier:
                look.at(members, [flat], sizes, self._largest(flat))
            arrived = self._travel(flat, f"{label}.bucket{number}", described)
            # The flag is behind the gradients of its bucket.
            *_, flag = parts = tf.split(arrived, sizes)
            for i, part in zip(members, parts, strict=False):
                result[i] = tf.reshape(part, result[i].shape)
        if look is None:
            return None, dense
        if carrier is None:
            flag = self._travel_alone(look.flag, f"{label}.suspect")
        return tf.reshape(tf.cast(flag, tf.float32) > 0, []), dense

    def _host_sum_of(self, label: str, tensors: Sequence[Any]) -> Any:
        """The sum of these tensors through memory that the ranks have in common, if all can."""
        tf, hvd = self._tf, self._hvd
        if self.process_set is not hvd.global_process_set or not self._host_sums.may_be_used(tf):
            return None
        dtypes = {tensor.dtype for tensor in tensors}
        as_they_are = (
            self._exchanges is None
            and self._op in (hvd.Average, hvd.Sum)
            and self._predivide == 1.0
            and len(dtypes) == 1
            and dtypes <= {tf.float32, tf.float64}
            and self._compress(tensors[0])[0] is tensors[0]
        )
        return self._host_sums.prepare(label, tensors, as_they_are)

    def _reduce_on_host(
        self, total: Any, result: list[Any], indices: Sequence[int], look: Look | None
    ) -> Any:
        """Put these tensors, reduced, into ``result``; gives the flag of all ranks' looks."""
        tf = self._tf
        tensors = [result[i] for i in indices]
        if look is not None:
            look.at(indices, tensors)
            tensors.append(tf.cast(look.flag, tensors[0].dtype))
        reduced = total.in_graph(tensors)
        self._sent_by_graph += [bytes_of(tf, tensor) for tensor in tensors]
        flag = None if look is None else reduced.pop() > 0
        for i, tensor in zip(indices, reduced, strict=True):
            result[i] = tensor
        return flag

    def _travel_alone(self, flag: Any, name: str) -> Any:
        tf, hvd = self._tf, self._hvd
        number = tf.cast(flag, tf.float32)
        self._sent_by_graph.append(4)
        return allreduce(tf, hvd, number, name, op=hvd.Sum, process_set=self.process_set)

    def _largest(self, tensor: Any) -> Any:
        """The norm below which the sum over ranks of what travels cannot overflow.

        None where that is so for each finite square of a norm.
        """
        tf = self._tf
        ranks = self._hvd.size_op(process_set_id=self.process_set.process_set_id)
        if self._exchanges is not None and self._exchanges.handle(tensor.dtype):
            return self._exchanges.safe_norm(ranks)
        wire, _ = self._compress(tf.zeros([0], tensor.dtype))
        if wire.dtype != tf.float16:
            return None
        return wire.dtype.max * min(1.0, self._predivide) / tf.cast(ranks, tf.float32)

    def _parts(self, label: str, members: Sequence[int], tensors: Sequence[Any]) -> list[Part]:
        return [
            Part(f"{label}.{i}", tuple(tensor.shape))
            for i, tensor in zip(members, tensors, strict=True)
        ]

    def _travel(self, flat: Any, name: str, parts: Sequence[Part] = ()) -> Any:
        """The reduction of a flat tensor, which begins with ``parts`` where shapes are known."""
        if self._exchanges is None or not self._exchanges.handle(flat.dtype):
            reduced, sent = self._travel_whole(flat, name)
        else:
            reduced, sent = self._exchanges.mean(flat, name, parts, self._travel_whole)
            if self._op == self._hvd.Sum:
                ranks = self._hvd.size_op(process_set_id=self.process_set.process_set_id)
                reduced = reduced * self._tf.cast(ranks, reduced.dtype)
        self._sent_by_graph.append(sent)
        return reduced

    def _travel_whole(self, tensor: Any, name: str) -> tuple[Any, Any]:
        """The reduction of a tensor by one all-reduce, and the bytes sent."""
        wire, undo = self._compress(tensor)
        reduced = allreduce(
            self._tf,
            self._hvd,
            wire,
            name,
            op=self._op,
            predivide=self._predivide,
            process_set=self.process_set,
        )
        return undo(reduced), bytes_of(self._tf, wire)

    def _compress(self, tensor: Any) -> tuple[Any, Callable[[Any], Any]]:
        if self._exchanges is not None:
            return tensor, lambda reduced: reduced
        wire, ctx = self._compression.compress(tensor)
        return wire, lambda reduced: self._compression.decompress(reduced, ctx)

    def _gather(self, slices: Any, name: str) -> Any:
        hvd, tf = self._hvd, self._tf
        if self._op not in (hvd.Average, hvd.Sum):
            raise NotImplementedError(
                f"{self.name}: sparse gradients can be summed or averaged only; give "
                "sparse_as_dense=True for other reductions"
            )
        options = {"ignore_name_scope": True, "process_set": self.process_set}
        values = kept_from_folding(tf, slices.values)
        values = hvd.allgather(values, name=f"{name}.values", **options)
        # Of one type on all ranks, those included that have no rows.
        rows = kept_from_folding(tf, tf.cast(slices.indices, tf.int64))
        self._sent_by_graph += [bytes_of(tf, values), bytes_of(tf, rows)]
        indices = hvd.allgather(rows, name=f"{name}.indices", **options)
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

    def _count_bytes(self) -> None:
        tf = self._tf
        if not tf.compat.v1.executing_eagerly_outside_functions() or not self._sent_by_graph:
            return  # a graph of TensorFlow 1 would not run it
        if self._sent is None:
            with tf.init_scope():
                self._sent = tf.Variable(0, dtype=tf.int64, trainable=False, name="sent")
        known = sum(n for n in self._sent_by_graph if isinstance(n, int))
        asked = [tf.cast(n, tf.int64) for n in self._sent_by_graph if not isinstance(n, int)]
        self._sent.assign_add(tf.add_n([tf.constant(known, tf.int64), *asked]))


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
                "XLA has no kernel for Horovod's collectives and for a guard's verdict. Leave "
                "jit_compile out of the function that applies gradients (what it calls may be "
                "compiled); in Keras give fit() a callback of hvdsync.keras.callbacks, which does "
                "so, or compile(jit_compile=False)"
            )
        frame = frame.f_back


def _numbered(tf: ModuleType, label: str) -> str:
    uses = _uses.setdefault(tf.compat.v1.get_default_graph(), {})
    uses[label] = uses.get(label, -1) + 1
    return f"{label}.{uses[label]}" if uses[label] else label


def _tensor(gradient: Any) -> Any:
    return gradient.values if hasattr(gradient, "values") else gradient


def sum_over_ranks(tf: ModuleType, hvd: ModuleType, tensor: Any, name: str) -> Any:
    """The sum of a tensor over ranks, which lets gradients through (they are summed too)."""

    def total(part: Any, name: str) -> Any:
        everyone = hvd.global_process_set
        return allreduce(tf, hvd, part, name, op=hvd.Sum, process_set=everyone)

    @tf.custom_gradient
    def summed(part: Any) -> Any:
        return total(part, name), lambda gradient: total(gradient, f"{name}.backward")

    return summed(tensor)
