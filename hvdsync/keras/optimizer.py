"""The distributed optimizer of Keras, for ``model.compile``: a Keras optimizer in, the same out."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdsync.comm import launch, world
from hvdsync.comm.comparison import noted, require_equal
from hvdsync.keras._backend import backend
from hvdsync.keras.guard import Guard
from hvdsync.sync.keras_local_steps import follow_rule, without_need
from hvdsync.sync.keras_optimizer import Sharing, distribute_optimizer, with_loss_scaling
from hvdsync.sync.options import (
    check_combination,
    check_compression,
    check_engine,
    check_gradient_options,
    momentum_of,
    option_facts,
)
from hvdsync.sync.variables import broadcast_through_host

logger = logging.getLogger(__name__)
hvd = backend.hvd
Compression = backend.Compression


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    backward_passes_per_step: int = 1,
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
        optimizer: a ``keras.optimizers.Optimizer``, built or not. The result shares its state and
            hyper-parameters and saves as its class, so that files load with Keras alone.
        name: part of the collectives' names; by default "Distributed" and the optimizer's class.
        device_dense, device_sparse: accepted for compatibility.
        compression: what travels in place of gradients; see :class:`Compression`.
        sparse_as_dense: send sparse gradients densely instead of gathering their rows.
        gradient_predivide_factor: gradients are divided by it before the sum and multiplied after.
        op: ``Average`` or ``Sum``.
        backward_passes_per_step: gradients of so many batches are added up before they are reduced
            and applied; ``average_aggregated_gradients`` divides the sum by their number.
        num_groups, groups: a number of groups, or lists of variables that travel together.
        process_set: ranks among which gradients are reduced.
        scale_local_gradients: divide gradients of local variables by the number of ranks.
        update: the update rule: None or ``Synchronous()``; or ``LocalSGD(period)`` or
            ``DiLoCo(period)``, by which each rank takes steps alone, and variables meet every so
            many.
        guard: judges gradients before each update; see ``on_nonfinite`` of :class:`Guard`.

    Clipping, gradient accumulation, moving averages and loss scaling of the optimizer work on
    reduced gradients. With one rank it is bit for bit the plain optimizer. Raises ``ValueError``
    for options that do not go together.
    """
    if op not in (hvd.Average, hvd.Sum):
        raise ValueError("op currently only supports Average and Sum")
    groups = check_gradient_options(
        averages=op == hvd.Average,
        predivide=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        passes=backward_passes_per_step,
    )
    check_compression(compression, elastic=launch.is_elastic(), momentum=momentum_of(optimizer))
    rule = without_need(
        check_combination(
            update,
            compression=compression,
            averages=op == hvd.Average,
            everyone=process_set is hvd.global_process_set,
            elastic=launch.is_elastic(),
        )
    )
    reducer = backend.make_reducer(
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
        accumulation = backend.make_accumulation(
            backward_passes_per_step, average_aggregated_gradients
        )
    verdict = None if guard is None else backend.make_verdict(guard)
    sharing = Sharing(reducer, accumulation, scale_local_gradients, verdict=verdict)
    distributed = distribute_optimizer(keras, with_loss_scaling(keras, optimizer), sharing)
    if rule is not None:
        follow_rule(distributed, functools.partial(backend.make_local_steps, reducer, rule))
    return distributed


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = hvd.Average,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = hvd.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A :func:`DistributedOptimizer` that leaves the weights of ``local_layers`` to each rank.

    ``local_layers`` is a ``keras.layers.Layer`` or several, built already. Stands for Horovod's of
    the same name.
    """
    layers = [] if local_layers is None else local_layers
    layers = [layers] if isinstance(layers, keras.layers.Layer) else list(layers)
    if not all(isinstance(layer, keras.layers.Layer) for layer in layers):
        raise ValueError("All local layers must be of keras.layers.Layer type.")
    distributed = DistributedOptimizer(
        optimizer,
        name=name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for layer in layers:
        for weight in layer.trainable_weights:
            distributed.register_local_var(weight)
    return distributed


def distribute(
    optimizer: Any,
    *,
    engine: str = "horovod",
    update: Any = None,
    compression: Any = Compression.none,
    accumulate: int = 1,
    guard: Guard | None = None,
    **options: Any,
) -> Any:
    """Make an optimizer data-parallel: ``model.compile(optimizer=hvd.distribute(optimizer))``.

    Gradients are averaged over ranks before they are applied. When the optimizer is built, which
    ``fit`` does before the first update, the trainable variables and the optimizer's state of rank
    0 are given to every rank; ``callbacks.BroadcastGlobalVariablesCallback`` adds the model's
    other variables. With one process the optimizer behaves bit for bit as before. In an elastic job
    nothing is broadcast, since a worker that joins builds while others train: there the elastic
    state's ``sync()`` makes replicas equal.

    Arguments:
        optimizer: a ``keras.optimizers.Optimizer``.
        engine: ``"horovod"``.
        update: the update rule. None, or ``Synchronous()``, averages gradients before each update.
            With ``LocalSGD(period)`` and ``DiLoCo(period)`` each rank takes steps alone, and
            replicas meet every so many: see docs/update-rules.md. The statistics of a model meet
            with its weights where ``fit`` has a ``BroadcastGlobalVariablesCallback``.
            ``optimizer.replicas_equal`` says whether replicas are equal,
            ``optimizer.synchronize_replicas()`` makes them so.
        compression: what travels in place of gradients; see :class:`Compression`.
        accumulate: batches per update. Their gradients are averaged, and travel at the last;
            ``optimizer.iterations`` counts updates.
        guard: a :class:`Guard`, which then judges the gradients before each update. On TensorFlow
            ``fit`` raises TensorFlow's own error with the text of ``NonFiniteGradient``. A
            ``callbacks.GuardCallback`` does the same, raises that error itself, and compares
            replicas too.
        options: further keyword arguments of :func:`DistributedOptimizer`.

    Raises ``ValueError`` for an engine or update rule that does not exist; and when the optimizer
    is built, :class:`RankMismatch` on every rank when options or variables differ between ranks.
    """
    check_engine(engine)
    if accumulate != 1:
        options.update(backward_passes_per_step=accumulate, average_aggregated_gradients=True)
    distributed = DistributedOptimizer(
        optimizer, compression=compression, update=update, guard=guard, **options
    )
    if guard is not None:
        options["on_nonfinite"] = guard.on_nonfinite
    if launch.is_elastic():
        return distributed
    facts = option_facts(optimizer, compression=compression, update=str(update), **options)

    def before_build(optimizer: Any, variables: Sequence[Any]) -> None:
        if world.current().size > 1:
            backend.eagerly(_compare, facts)
            _broadcast_from_rank_zero(optimizer, variables)

    distributed._sharing.before_build = before_build
    if distributed.built:
        before_build(distributed, distributed._trainable_variables)
    return distributed


def _compare(facts: Mapping[str, Any]) -> None:
    require_equal(
        "the optimizers", {**facts, **noted()}, "Give every rank the same one, with equal options"
    )


def _broadcast_from_rank_zero(optimizer: Any, variables: Sequence[Any]) -> None:
    if not backend.are_initialized(variables):
        logger.warning(
            "the model is built inside its first step, where its variables cannot be broadcast; "
            "build it before fit(), or give fit() a BroadcastGlobalVariablesCallback"
        )
        return
    shared = [v for v in variables if optimizer._sharing.reducer.key(v) not in local(optimizer)]
    backend.eagerly(broadcast_through_host, [*shared, *optimizer.variables], 0)


def local(optimizer: Any) -> set[Any]:
    """Keys of the variables that stay each rank's own."""
    return optimizer._sharing.local
