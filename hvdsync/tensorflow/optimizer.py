"""The distributed optimizer of TensorFlow: a Keras optimizer goes in, one that reduces comes out.

Optimizers of TensorFlow 1 (``tf.compat.v1.train``) are handed on to Horovod's own wrapper.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdsync.comm import horovod as _horovod
from hvdsync.comm import launch, world
from hvdsync.comm.comparison import noted, require_equal
from hvdsync.guard.tensorflow_nonfinite import GraphVerdict
from hvdsync.sync.accumulation import GraphAccumulation
from hvdsync.sync.keras_local_steps import follow_rule, statistics_among, without_need
from hvdsync.sync.keras_optimizer import (
    Sharing,
    distribute_optimizer,
    sharing_of,
    with_loss_scaling,
)
from hvdsync.sync.keras_shared_steps import GraphHandOver, SharedVariables
from hvdsync.sync.options import (
    check_combination,
    check_compression,
    check_engine,
    check_gradient_options,
    momentum_of,
    option_facts,
)
from hvdsync.sync.tensorflow_local_steps import GraphLocalSteps
from hvdsync.sync.tensorflow_reducer import GraphReducer
from hvdsync.sync.update_rules import Asynchronous
from hvdsync.tensorflow.compression import Compression
from hvdsync.tensorflow.functions import broadcast_variables
from hvdsync.tensorflow.guard import Guard

hvd = _horovod.load("tensorflow")


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    update: Any = None,
    guard: Guard | None = None,
) -> Any:
    """The optimizer, with gradients reduced over ranks before they are applied (Horovod's).

    Arguments:
        optimizer: a ``keras.optimizers.Optimizer`` or a ``tf.compat.v1.train.Optimizer``. Do not
            combine it with a :func:`DistributedGradientTape`: gradients would be reduced twice.
        name: part of the collectives' names; by default "Distributed" and the optimizer's class.
        use_locking, device_dense, device_sparse: accepted for compatibility.
        backward_passes_per_step: gradients of so many calls are added up before they are reduced
            and applied; ``average_aggregated_gradients`` divides the sum by their number.
        compression, sparse_as_dense, op, gradient_predivide_factor, num_groups, groups,
        process_set, scale_local_gradients: as in :func:`DistributedGradientTape`.
        update: the update rule: None or ``Synchronous()``; or ``LocalSGD(period)`` or
            ``DiLoCo(period)``, by which each rank takes steps alone, and variables meet every so
            many.
        guard: judges gradients before each update; see ``on_nonfinite`` of :class:`Guard`.

    The result shares all state with the optimizer given, and saves as its class. With one rank it
    is bit for bit the plain optimizer. Raises ``ValueError`` for options that do not go together.
    """
    groups = check_gradient_options(
        averages=op == hvd.Average,
        predivide=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        passes=backward_passes_per_step,
    )
    check_compression(
        compression,
        adds=op in (hvd.Average, hvd.Sum),
        elastic=launch.is_elastic(),
        momentum=momentum_of(optimizer),
    )
    if op == hvd.Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    rule = without_need(
        check_combination(
            update,
            compression=compression,
            averages=op == hvd.Average,
            everyone=process_set is hvd.global_process_set,
            elastic=launch.is_elastic(),
        )
    )
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if rule is not None:
            raise ValueError(
                f"update={type(rule).__name__} is for Keras optimizers, found "
                f"{type(optimizer).__name__}"
            )
        if guard is not None:
            raise ValueError(
                f"a guard judges gradients of Keras optimizers, found {type(optimizer).__name__}"
            )
        return hvd.DistributedOptimizer(
            optimizer,
            name=name,
            use_locking=use_locking,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            average_aggregated_gradients=average_aggregated_gradients,
            groups=groups,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )
    reducer = GraphReducer(
        tf,
        hvd,
        name or f"Distributed{type(optimizer).__name__}",
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
    )
    accumulation = None
    if backward_passes_per_step > 1:
        accumulation = GraphAccumulation(tf, backward_passes_per_step, average_aggregated_gradients)
    verdict = None if guard is None else GraphVerdict(tf, hvd, guard)
    sharing = Sharing(reducer, accumulation, scale_local_gradients, verdict=verdict)
    distributed = distribute_optimizer(keras, with_loss_scaling(keras, optimizer), sharing)
    if isinstance(rule, Asynchronous):
        follow_rule(distributed, functools.partial(SharedVariables, rule, GraphHandOver(tf)))
    elif rule is not None:
        follow_rule(distributed, functools.partial(GraphLocalSteps, tf, rule, reducer))
    return distributed


def distribute(
    model: Any,
    optimizer: Any,
    *,
    engine: str = "horovod",
    update: Any = None,
    compression: Any = Compression.none,
    accumulate: int = 1,
    guard: Guard | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Make replicas equal and keep them so: broadcast from rank 0, average gradients after.

    The variables of rank 0's model and optimizer are given to every rank, and the optimizer is
    wrapped, so that a plain ``tf.GradientTape`` and ``optimizer.apply_gradients`` (or ``apply``)
    train on all ranks. With one process both behave bit for bit as before. In an elastic job
    nothing travels, since a worker that joins calls this while others train: there the elastic
    state's ``sync()`` makes replicas equal.

    Arguments:
        model: anything with ``variables`` (a Keras model, a ``tf.Module``) or a list of variables.
            It must be built: its variables exist. It is given back itself.
        optimizer: a Keras optimizer over the model's variables.
        engine: ``"horovod"``.
        update: the update rule. None, or ``Synchronous()``, averages gradients before each update.
            With ``LocalSGD(period)`` and ``DiLoCo(period)`` each rank takes steps alone, and
            replicas meet every so many: see docs/update-rules.md. ``optimizer.replicas_equal``
            then says whether they are equal, ``optimizer.synchronize_replicas()`` makes them so.
        compression: what travels in place of gradients; see :class:`Compression`.
        accumulate: calls of the optimizer per update. Their gradients are averaged, and travel at
            the last; ``optimizer.iterations`` counts updates.
        guard: a :class:`Guard`, which then judges the gradients before each update, out of a
            ``tf.function`` as TensorFlow's own error with the text of ``NonFiniteGradient``. Call
            its ``watch`` with the batch for it to tell whether that was bad already, and its
            ``check`` after each step, outside of functions, to have replicas compared.
        options: further keyword arguments of :func:`DistributedOptimizer`.

    Raises ``ValueError`` for an engine or update rule that does not exist and for a model without
    variables, and ``RankMismatch`` on every rank when models or options differ between ranks.
    """
    check_engine(engine)
    variables = list(getattr(model, "variables", model))
    if not variables:
        raise ValueError(
            "distribute: the model has no variables yet; build it first, with "
            "model.build(input_shape) or by calling it on a batch"
        )
    if accumulate != 1:
        options.update(backward_passes_per_step=accumulate, average_aggregated_gradients=True)
    distributed = DistributedOptimizer(
        optimizer, compression=compression, update=update, guard=guard, **options
    )
    trainable = list(getattr(model, "trainable_variables", variables))
    local_steps = getattr(sharing_of(distributed), "local_steps", None)
    if local_steps is not None:
        local_steps.statistics = statistics_among(variables, trainable)
    if guard is not None:
        options["on_nonfinite"] = guard.on_nonfinite
    if world.current().size > 1 and not launch.is_elastic():
        require_equal(
            "the optimizers",
            {
                **option_facts(optimizer, compression=compression, update=str(update), **options),
                **noted(),
            },
            "Give every rank the same one, with equal options",
        )
        if not distributed.built:
            distributed.build(trainable)
        broadcast_variables([*variables, *distributed.variables], root_rank=0)
    return model, distributed
