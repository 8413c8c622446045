"""Horovod's collectives on TensorFlow tensors, which also work in one process without ``init``.

Tensors of this rank go in, combined tensors come out; graphs differentiate through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdsync.comm import horovod as _horovod
from hvdsync.comm import world
from hvdsync.sync import host_sum
from hvdsync.sync.tensorflow_gradients import kept_from_folding, variable_of
from hvdsync.tensorflow.compression import Compression

hvd = _horovod.load("tensorflow")


def _without_runtime() -> bool:
    """Whether this is one process that never initialised Horovod."""
    if world.is_active() or hvd.is_initialized():
        return False
    world.current()  # raises when a launcher started several ranks
    return True


def _scaled(tensor: Any, factor: float) -> Any:
    tensor = tensor if isinstance(tensor, tf.IndexedSlices) else tf.identity(tensor)
    return tensor if factor == 1.0 else tensor * tf.cast(factor, tensor.dtype)


def _native(tensor: Any) -> Any:
    tensor = variable_of(tensor)
    return tensor if isinstance(tensor, tf.IndexedSlices) else tf.convert_to_tensor(tensor)


def _sendable(tensor: Any) -> Any:
    tensor = _native(tensor)
    return tensor if isinstance(tensor, tf.IndexedSlices) else kept_from_folding(tf, tensor)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = hvd.global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Element-wise reduction over ranks (stands for Horovod's ``allreduce``).

    ``tensor`` is a tensor, a ``tf.Variable``, a ``keras.Variable`` or ``tf.IndexedSlices`` (whose
    rows are gathered); shape and dtype are equal on all ranks. ``op`` is ``Average`` (default),
    ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``. On the wire: the compressed tensor.
    """
    if _without_runtime():
        hvd.handle_average_backwards_compatibility(op, average)
        return _scaled(_native(tensor), prescale_factor * postscale_factor)
    tensor = _sendable(tensor)
    sparse = isinstance(tensor, tf.IndexedSlices)
    wire, ctx = (tensor, None) if sparse else compression.compress(tensor)
    # Horovod does not know bfloat16; float32 holds each of its values.
    narrow = not sparse and wire.dtype == tf.bfloat16
    result = hvd.allreduce(
        tf.cast(wire, tf.float32) if narrow else wire,
        average=average,
        device_dense=device_dense,
        device_sparse=device_sparse,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
        ignore_name_scope=ignore_name_scope,
    )
    if sparse:
        return result
    return compression.decompress(tf.cast(result, wire.dtype) if narrow else result, ctx)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = hvd.global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> Any:
    """One reduction of several tensors, all or none (stands for Horovod's ``grouped_allreduce``).

    Arguments as :func:`allreduce`, for a sequence; a list comes back.
    """
    if not tensors:
        return tensors
    if _without_runtime():
        hvd.handle_average_backwards_compatibility(op, average)
        return [_scaled(_native(t), prescale_factor * postscale_factor) for t in tensors]
    native = [_sendable(t) for t in tensors]
    # Horovod's own pairs the shapes of sparse gradients with the wrong tensors of a mixed list.
    dense = [i for i, t in enumerate(native) if not isinstance(t, tf.IndexedSlices)]
    options = {
        "average": average,
        "device_dense": device_dense,
        "device_sparse": device_sparse,
        "compression": compression,
        "op": op,
        "prescale_factor": prescale_factor,
        "postscale_factor": postscale_factor,
        "process_set": process_set,
        "ignore_name_scope": ignore_name_scope,
    }
    result = [t if i in dense else allreduce(t, **options) for i, t in enumerate(native)]
    if dense:
        wires = [compression.compress(native[i]) for i in dense]
        sent = [tf.cast(w, tf.float32) if w.dtype == tf.bfloat16 else w for w, _ in wires]
        options["compression"] = Compression.none
        reduced = hvd.grouped_allreduce(sent, name=name, **options)
        for i, (wire, ctx), got in zip(dense, wires, reduced, strict=True):
            result[i] = compression.decompress(tf.cast(got, wire.dtype), ctx)
    return result


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """Concatenation over ranks along axis 0, whose lengths may differ (Horovod's ``allgather``)."""
    if _without_runtime():
        return tf.identity(_native(tensor))
    return hvd.allgather(_sendable(tensor), name, ignore_name_scope, process_set)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """:func:`allgather` of several tensors, all or none (Horovod's ``grouped_allgather``)."""
    if _without_runtime():
        return [tf.identity(_native(t)) for t in tensors]
    return hvd.grouped_allgather(
        [_sendable(t) for t in tensors], name, ignore_name_scope, process_set
    )


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """The tensor of rank ``root_rank``; shape and dtype are equal everywhere (Horovod's)."""
    if _without_runtime():
        return tf.identity(_native(tensor))
    return hvd.broadcast(_sendable(tensor), root_rank, name, ignore_name_scope, process_set)


def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """Overwrite variables with those of ``root_rank`` and give back their values (Horovod's)."""
    native = [variable_of(v) for v in variables]
    if _without_runtime():
        return [v.read_value() for v in native]
    return hvd.broadcast_(native, root_rank, name, process_set)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """Send slices along axis 0 to the ranks and receive theirs (stands for Horovod's ``alltoall``).

    ``splits`` says how many rows go to each rank, default equal shares. With ``splits`` given, a
    pair comes back: the received rows, and how many came from each rank.
    """
    if _without_runtime():
        received = tf.identity(_native(tensor))
        return received if splits is None else (received, tf.identity(splits))
    return hvd.alltoall(_sendable(tensor), splits, name, ignore_name_scope, process_set)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = hvd.Average,
    name: str | None = None,
    process_set: Any = hvd.global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduction over ranks, of which each rank gets its part of axis 0 (Horovod's)."""
    if _without_runtime():
        return _scaled(_native(tensor), prescale_factor * postscale_factor)
    return hvd.reducescatter(
        _sendable(tensor),
        device_dense,
        compression,
        op,
        name,
        process_set,
        ignore_name_scope,
        prescale_factor,
        postscale_factor,
    )


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = hvd.Average,
    process_set: Any = hvd.global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """:func:`reducescatter` of several tensors, all or none (Horovod's)."""
    if not tensors:
        return tensors
    if _without_runtime():
        return [_scaled(_native(t), prescale_factor * postscale_factor) for t in tensors]
    return hvd.grouped_reducescatter(
        [_sendable(t) for t in tensors],
        device_dense,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
    )


def join() -> Any:
    """Wait for all ranks; until then this one contributes zeros (stands for Horovod's ``join``).

    Gives the rank that joined last.
    """
    if _without_runtime():
        return tf.constant(0)
    return tf.constant(host_sum.join(hvd.join))
