"""Variables and Python objects travel from one rank to all, or from all to all.

Horovod's broadcast functions for ``tf.Variable`` and ``keras.Variable``, in eager mode and graphs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvdsync.comm import horovod as _horovod
from hvdsync.comm import verbs, world
from hvdsync.sync.buckets import plan_buckets
from hvdsync.sync.tensorflow_gradients import variable_of
from hvdsync.sync.variables import refuse_different

hvd = _horovod.load("tensorflow")

# Variables travel packed together up to this size: few names to agree on, little extra memory.
_CHUNK_BYTES = 64 * 2**20


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: Any = hvd.global_process_set,
    inplace: bool = False,
) -> Any:
    """Give every rank the values of ``root_rank`` (stands for Horovod's ``broadcast_variables``).

    Arguments:
        variables: ``tf.Variable`` or ``keras.Variable``, of any shapes and numeric dtypes; equal
            names are fine. All ranks give the same shapes and dtypes in the same order.
        root_rank: global rank of the values.
        process_set: ranks that take part; default all.
        inplace: accepted for compatibility; extra memory is at most 64 MiB either way, or the
            largest variable.

    Works in eager mode, inside ``tf.function``, and in a TensorFlow 1 graph, where the operation
    to run is given back. Values arrive bit by bit. On the wire: the variables' bytes, in chunks of
    64 MiB. In eager mode raises :class:`RankMismatch` on every rank when shapes or dtypes differ.
    """
    listed = [variable_of(variable) for variable in variables]
    if not listed or _alone(process_set):
        return None if tf.executing_eagerly() else tf.no_op()
    if not tf.executing_eagerly():
        return tf.group(*_assign_all(listed, root_rank, process_set))
    refuse_different(variables if isinstance(variables, Sequence) else listed, process_set)

    def assign_all() -> None:
        _assign_all(listed, root_rank, process_set)

    # A function runs the broadcasts of all chunks at once; eager mode one after the other.
    tf.function(assign_all, autograph=False)()
    return None


def _alone(process_set: Any) -> bool:
    return world.current().size == 1 or not process_set.included() or process_set.size() == 1


def _assign_all(variables: Sequence[Any], root_rank: int, process_set: Any) -> list[Any]:
    plan = plan_buckets(
        [variable.shape.num_elements() for variable in variables],
        [variable.dtype.base_dtype.name for variable in variables],
        limit_bytes=_CHUNK_BYTES,
        first_bytes=None,
    )
    shapes = "\0".join(str(variable.shape) for variable in variables)
    label = f"hvdsync.broadcast.{zlib.crc32(shapes.encode()):08x}"
    assigned = []
    for number, bucket in enumerate(plan):
        members = [variables[i] for i in bucket.members]
        flat = tf.concat([tf.reshape(member, [-1]) for member in members], 0)
        received = _broadcast_flat(flat, root_rank, f"{label}.{number}", process_set)
        parts = tf.split(received, list(bucket.sizes))
        for member, part in zip(members, parts, strict=True):
            assigned.append(member.assign(tf.reshape(part, member.shape), read_value=False))
    return assigned


_CARRIED = {"uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64"}


def _broadcast_flat(flat: Any, root_rank: int, name: str, process_set: Any) -> Any:
    options = {"ignore_name_scope": True, "process_set": process_set}
    if flat.dtype.name in _CARRIED or flat.dtype == tf.bool:
        return hvd.broadcast(flat, root_rank, name=name, **options)
    # Dtypes that Horovod does not know (bfloat16, uint32, complex64, ...) travel as their bytes.
    count = tf.size(flat)
    raw = tf.reshape(tf.bitcast(flat, tf.uint8), [-1])
    received = hvd.broadcast(raw, root_rank, name=name, **options)
    return tf.bitcast(tf.reshape(received, tf.stack([count, flat.dtype.size])), flat.dtype)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = hvd.global_process_set,
) -> Any:
    """The object of rank ``root_rank``, on every rank; pickled (stands for Horovod's).

    ``session`` serves TensorFlow 1 graphs only.
    """
    if not tf.executing_eagerly() and not tf.inside_function():
        return hvd.broadcast_object(obj, root_rank, session, name, process_set)
    with tf.init_scope():
        return verbs.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: Any = hvd.global_process_set,
) -> list[Any]:
    """The objects of all ranks in rank order; pickled (stands for Horovod's).

    ``session`` serves TensorFlow 1 graphs only.
    """
    if not tf.executing_eagerly() and not tf.inside_function():
        return hvd.allgather_object(obj, session, name, process_set)
    with tf.init_scope():
        return verbs.allgather_object(obj, name, process_set)
