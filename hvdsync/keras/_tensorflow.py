"""What ``hvdsync.keras`` needs of its TensorFlow backend: tensors, collectives, reducers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvdsync.comm import horovod as _horovod
from hvdsync.comm import world
from hvdsync.guard.keras_probe import tape_differentiates
from hvdsync.guard.tensorflow_nonfinite import GraphVerdict
from hvdsync.sync.accumulation import GraphAccumulation
from hvdsync.sync.compression import tensorflow_compression
from hvdsync.sync.elastic import tensorflow_lost_rank
from hvdsync.sync.keras_shared_steps import GraphHandOver, SharedVariables
from hvdsync.sync.tensorflow_gradients import variable_of
from hvdsync.sync.tensorflow_local_steps import GraphLocalSteps
from hvdsync.sync.tensorflow_reducer import GraphReducer
from hvdsync.sync.tensorflow_reducer import sum_over_ranks as _sum_over_ranks
from hvdsync.sync.update_rules import Asynchronous

FRAMEWORK = "tensorflow"
hvd = _horovod.load(FRAMEWORK)

Compression = tensorflow_compression(tf)


def to_tensor(value: Any, name: str | None = None) -> Any:
    """A tensor with this value; Keras variables and NumPy arrays too."""
    value = variable_of(value)
    return value if tf.is_tensor(value) else tf.convert_to_tensor(value)


def make_reducer(
    name: str,
    *,
    compression: Any,
    op: Any,
    gradient_predivide_factor: float,
    process_set: Any,
    sparse_as_dense: bool,
    groups: Any,
) -> Any:
    """The reducer of one optimizer's gradients."""
    return GraphReducer(
        tf,
        hvd,
        name,
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
    )


def make_local_steps(reducer: Any, rule: Any, trained: Any, share_state: Any) -> Any:
    """Steps that each rank takes alone."""
    if isinstance(rule, Asynchronous):
        return SharedVariables(rule, GraphHandOver(tf), trained, share_state)
    return GraphLocalSteps(tf, rule, reducer, trained, share_state)


def make_verdict(guard: Any) -> Any:
    """What a guard makes of gradients before each update."""
    return GraphVerdict(tf, hvd, guard)


differentiate = tape_differentiates(tf)


def make_accumulation(passes: int, average: bool) -> Any:
    """Gradients added up over backward passes."""
    return GraphAccumulation(tf, passes, average)


def allreduce(
    value: Any, name: str | None, op: Any, prescale: float, postscale: float, compression: Any
) -> Any:
    """Element-wise reduction over ranks."""
    tensor = to_tensor(value)
    if not (world.is_active() or hvd.is_initialized()):
        return tensor * tf.cast(prescale * postscale, tensor.dtype)
    wire, ctx = compression.compress(tensor)
    narrow = wire.dtype == tf.bfloat16  # which Horovod does not know
    reduced = hvd.allreduce(
        tf.cast(wire, tf.float32) if narrow else wire,
        op=op,
        prescale_factor=prescale,
        postscale_factor=postscale,
        name=name,
    )
    return compression.decompress(tf.cast(reduced, wire.dtype), ctx)


def allgather(value: Any, name: str | None) -> Any:
    """Concatenation over ranks along axis 0."""
    tensor = to_tensor(value)
    return hvd.allgather(tensor, name=name) if hvd.is_initialized() else tensor


def broadcast(value: Any, root_rank: int, name: str | None) -> Any:
    """The value of rank ``root_rank``."""
    tensor = to_tensor(value)
    return hvd.broadcast(tensor, root_rank, name=name) if hvd.is_initialized() else tensor


def reducescatter(value: Any, name: str | None, op: Any) -> Any:
    """Reduction over ranks, of which each gets its part of axis 0."""
    tensor = to_tensor(value)
    return hvd.reducescatter(tensor, op=op, name=name) if hvd.is_initialized() else tensor


def sum_over_ranks(tensor: Any, name: str) -> Any:
    """The sum over ranks, which lets gradients through."""
    return _sum_over_ranks(tf, hvd, tensor, name)


def are_initialized(variables: Sequence[Any]) -> bool:
    """Whether the variables have values; those made while a function is traced get them later."""
    with tf.init_scope():
        return all(bool(variable_of(v).is_initialized()) for v in variables)


def eagerly(function: Any, *args: Any) -> Any:
    """Run a function at once, also while a graph is being traced."""
    with tf.init_scope():
        return function(*args)


def as_lost_rank(error: BaseException) -> HorovodInternalError | None:
    """The error that elastic training recovers from, if this one says that a rank was lost."""
    return tensorflow_lost_rank(tf, error)


def stamp_batches(loop: Any) -> Callable[[], float] | None:
    """When the last batch was there, in seconds since 1970; None where that cannot be told.

    ``loop`` is Keras's iterator over the batches of ``fit``, which fetches them inside the function
    of a step, where Python cannot look.
    """
    dataset = getattr(loop, "_distributed_dataset", None)
    if not isinstance(dataset, tf.data.Dataset):
        return None
    arrival = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="arrival")
    in_tuples = isinstance(dataset.element_spec, tuple)

    def stamp(*batch: Any) -> Any:
        arrival.assign(tf.timestamp())
        return batch if in_tuples else batch[0]

    # One batch ahead, as TensorFlow has it by itself behind steps that do not run in parallel; that
    # one must not be put behind the stamp.
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    loop._distributed_dataset = dataset.prefetch(1).map(stamp).with_options(options)
    return lambda: float(arrival.numpy())


def make_dataset(begin: Callable[[], Iterator[Any]], length: int) -> Any:
    """What ``fit`` takes, of batches in NumPy arrays; each pass of ``begin`` has ``length``."""
    first = next(begin(), None)
    if first is None:
        return tf.data.Dataset.from_tensors(0.0).take(0)
    signature = tf.nest.map_structure(
        lambda part: tf.TensorSpec((None, *np.shape(part)[1:]), np.asarray(part).dtype), first
    )
    dataset = tf.data.Dataset.from_generator(begin, output_signature=signature)
    return dataset.apply(tf.data.experimental.assert_cardinality(length)).prefetch(tf.data.AUTOTUNE)


def first_batches(data: Any, count: int) -> Any:
    """The first ones of a ``tf.data.Dataset``; None for other data."""
    return data.take(count) if isinstance(data, tf.data.Dataset) else None


def padded_batches(data: Any, count: int, scales: Any, with_weights: Callable[..., Any]) -> Any:
    """A ``tf.data.Dataset`` of ``count`` batches, weighted and filled up; None for other data.

    ``with_weights(batch, scale, ones)`` gives the weighted batch.
    """
    if not isinstance(data, tf.data.Dataset):
        return None

    def weigh(batch: Any, scale: Any) -> Any:
        return with_weights(batch, scale, lambda x: tf.ones(tf.shape(x)[:1]))

    own = tf.data.Dataset.from_tensor_slices(tf.constant(scales[:count], tf.float32))
    weighted = tf.data.Dataset.zip((data, own)).map(weigh)
    if count < len(scales):
        stand_in = tf.data.Dataset.from_tensors(next(iter(data.take(1))))
        repeated = stand_in.repeat(len(scales) - count).map(lambda *b: weigh(b, 0.0))
        weighted = weighted.concatenate(repeated)
    return weighted
