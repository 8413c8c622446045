"""Compressed TensorFlow gradients: flat tensors in, their means over ranks out.

Makes the collectives that a compressor asks for, in graphs; TensorFlow and Horovod are handed in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from hvdsync.comm import launch
from hvdsync.sync.compression.exchange import BucketCompressor, Collective, Part, State
from hvdsync.sync.compression.memory import Memory
from hvdsync.sync.compression.tensorflow_arrays import TensorFlowArrays
from hvdsync.sync.tensorflow_gradients import kept_from_folding


class Exchanges:
    """What a :class:`hvdsync.sync.tensorflow_reducer.GraphReducer` needs of a compressor.

    States are variables, made while a function is traced and kept when it is traced again.
    """

    def __init__(
        self, tf: ModuleType, hvd: ModuleType, compressor: BucketCompressor, process_set: Any
    ) -> None:
        self._tf = tf
        self._hvd = hvd
        self._compressor = compressor
        self._process_set = process_set
        self._xp = TensorFlowArrays(tf)
        self.memory = Memory(self._xp, compressor)
        self._owners: dict[str, list[weakref.ref[Any]]] = {}

    def handle(self, dtype: Any) -> bool:
        """Whether tensors of this dtype are compressed."""
        return self._compressor.handles(dtype.name)

    def safe_norm(self, ranks: Any) -> Any:
        """A norm below which nothing overflows; None where that is so for each finite square."""
        largest = self._tf.float32.max
        safe = self._compressor.safe_norm(largest, 1)
        return None if safe == largest else self._tf.constant(safe, self._tf.float32)

    def begin(self, label: str, sources: Sequence[weakref.ref[Any]]) -> None:
        """Work on the gradients of ``sources`` from now on; ``label`` is that of their names."""
        if self._owners.get(label) != list(sources):
            # Other variables than those that were called so before.
            self._owners[label] = list(sources)
            self.memory.forget(f"{label}.")

    def end(self) -> None:
        """All gradients of a step are reduced."""
        self.memory.count_step()

    def mean(
        self,
        flat: Any,
        name: str,
        parts: Sequence[Part],
        whole: Callable[[Any, str], tuple[Any, Any]],
    ) -> tuple[Any, Any]:
        """The mean of a flat tensor over ranks, and the bytes sent.

        ``whole(flat, name)`` gives the same without compression. There are no ``parts`` where
        shapes are not known, and what remembers a tensor does not compress it then.
        """
        tf = self._tf
        if self._compressor.keeps_error and not parts:
            return whole(flat, name)
        states = self.memory.recall(parts, flat)
        if not self._compressor.start_step:
            return self._compressed(flat, name, parts, states)
        return tuple(
            tf.cond(
                self.memory.steps < self._compressor.start_step,
                lambda: _alike(tf, *whole(flat, name)),
                lambda: _alike(tf, *self._compressed(flat, name, parts, states)),
            )
        )

    def _compressed(
        self, flat: Any, name: str, parts: Sequence[Part], states: Sequence[State]
    ) -> tuple[Any, Any]:
        tf = self._tf
        # A graph outlives a change of an elastic world's size.
        ranks = self._process_set.size()
        if launch.is_elastic():
            ranks = self._hvd.size_op(process_set_id=self._process_set.process_set_id)
        exchange = self._compressor.exchange(self._xp, flat, parts, states, ranks)
        sent: list[Any] = []
        collective = next(exchange)
        while True:
            number = len(sent)
            sent.append(bytes_of(tf, collective.tensor))
            try:
                collective = exchange.send(
                    self._make(collective, f"{name}.{number}" if number else name, ranks)
                )
            except StopIteration as done:
                pieces, new = done.value
                break
        mean = tf.ensure_shape(tf.concat(pieces, 0), flat.shape)
        self._remember(parts, new, tf.math.is_finite(tf.reduce_sum(mean)))
        return mean, tf.add_n([tf.cast(n, tf.int64) for n in sent])

    def _make(self, collective: Collective, name: str, ranks: Any) -> Any:
        tf, hvd = self._tf, self._hvd
        tensor = collective.tensor
        if collective.kind == "sum":
            return allreduce(tf, hvd, tensor, name, op=hvd.Sum, process_set=self._process_set)
        options = {"name": name, "ignore_name_scope": True, "process_set": self._process_set}
        tensor = kept_from_folding(tf, tensor)
        if collective.kind == "alltoall":
            return hvd.alltoall(tensor, **options)
        length = tensor.shape[0]
        gathered = hvd.allgather(tensor, **options)
        return tf.reshape(gathered, [ranks, -1 if length is None else length])

    def _remember(self, parts: Sequence[Part], new: Sequence[State], is_finite: Any) -> None:
        """Keep the new states; after a step whose mean is not finite the old ones stay."""
        tf = self._tf
        changed = [(part, state) for part, state in zip(parts, new, strict=False) if state]
        if not changed:
            return

        def remember() -> Any:
            for part, state in changed:
                self.memory.remember(part, state)
            return tf.constant(True)

        tf.cond(is_finite, remember, lambda: tf.constant(False))


def _alike(tf: ModuleType, mean: Any, sent: Any) -> tuple[Any, Any]:
    return mean, tf.cast(sent, tf.int64)


def bytes_of(tf: ModuleType, tensor: Any) -> Any:
    """The bytes of a tensor: a number where its shape is known, otherwise a tensor."""
    if tensor.shape.is_fully_defined():
        return tensor.shape.num_elements() * tensor.dtype.size
    return tf.size(tensor, tf.int64) * tensor.dtype.size


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
    tensor = kept_from_folding(tf, tensor)
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
