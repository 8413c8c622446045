"""Keras values, variables and objects of this rank in; those of all ranks, or of one, out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from hvdsync.comm import verbs, world
from hvdsync.keras._backend import backend
from hvdsync.sync.variables import broadcast_through_host

hvd = backend.hvd


def _check_alone() -> None:
    world.current()  # raises when a launcher started several ranks and none was initialised


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = backend.Compression.none,
) -> Any:
    """Reduction of a value over ranks, as a tensor of the backend (stands for Horovod's).

    Arguments:
        value: array, tensor, variable or number; shape and dtype are equal on all ranks.
        name: name of the collective; needed only where ranks may not call in the same order.
        average: Horovod's older way to say ``op``: True for ``Average``, False for ``Sum``.
        prescale_factor, postscale_factor: multiplied before and after the reduction.
        op: ``Average`` (default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum``.
        compression: what travels: ``Compression.none``, ``.fp16`` or ``.bf16``.
    """
    _check_alone()
    if op is not None and average is not None:
        raise ValueError("allreduce: give either op or average, not both")
    if op is None:
        op = hvd.Sum if average is False else hvd.Average
    return backend.allreduce(value, name, op, prescale_factor, postscale_factor, compression)


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenation over ranks along axis 0, whose lengths may differ (stands for Horovod's)."""
    _check_alone()
    return backend.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """The value of rank ``root_rank``; shape and dtype are equal on all ranks (Horovod's)."""
    _check_alone()
    return backend.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: Any = hvd.Average) -> Any:
    """Reduction over ranks, of which each rank gets its part of axis 0 (stands for Horovod's)."""
    _check_alone()
    return backend.reducescatter(value, name, op)


def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> None:
    """Give every rank the values of ``root_rank``, for a model's and an optimizer's variables.

    Works for any dtype and for equal names. On the wire: shapes and dtypes pickled, then bytes in
    chunks of 64 MiB. Raises :class:`RankMismatch` on every rank when shapes or dtypes differ.
    """
    broadcast_through_host(list(variables), root_rank)


def broadcast_global_variables(root_rank: int) -> Any:
    """Broadcast all variables of a TensorFlow 1 graph (stands for Horovod's).

    In today's Keras there is no list of all variables: ``RuntimeError``, as Horovod raises, with
    what to use instead.
    """
    if not hasattr(hvd, "broadcast_global_variables") or _is_eager():
        raise RuntimeError(
            "broadcast_global_variables() does not support eager execution; use "
            "callbacks.BroadcastGlobalVariablesCallback(root_rank) in fit(), or "
            "broadcast_variables(model.variables + optimizer.variables, root_rank)"
        )
    return hvd.broadcast_global_variables(root_rank)


def _is_eager() -> bool:
    executing = getattr(hvd, "_executing_eagerly", None)
    return True if executing is None else bool(executing())


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None
) -> Any:
    """The object of rank ``root_rank``, on every rank; pickled (stands for Horovod's)."""
    return verbs.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """The objects of all ranks in rank order; pickled (stands for Horovod's)."""
    return verbs.allgather_object(obj, name, process_set)


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = backend.Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """A saved Keras model, with its optimizer distributed again and its state kept (Horovod's).

    Arguments:
        filepath: ``.keras`` or ``.h5`` file.
        custom_optimizers: optimizer classes that Keras does not know.
        custom_objects: names to classes or functions that Keras does not know.
        compression: as in :func:`DistributedOptimizer`.
        legacy_opts: accepted for compatibility; Keras 3 has no legacy optimizers.

    Every rank reads the file. Nothing travels.
    """
    from hvdsync.keras.optimizer import DistributedOptimizer

    known = {cls.__name__: cls for cls in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model
