"""The one call that makes a PyTorch script data-parallel: model and optimizer in, both back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hvdsync.comm import launch, process_group, world
from hvdsync.sync.options import check_combination, check_engine
from hvdsync.torch.compression import Compression
from hvdsync.torch.functions import (
    broadcast_optimizer_state,
    broadcast_parameters,
    broadcast_state,
)
from hvdsync.torch.optimizer import DistributedOptimizer

if TYPE_CHECKING:
    from hvdsync.torch.guard import Guard


def distribute(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    engine: str | None = None,
    update: Any = None,
    compression: Any = Compression.none,
    accumulate: int = 1,
    guard: Guard | None = None,
    **options: Any,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Make replicas equal and keep them so: broadcast from rank 0, average gradients after.

    Parameters, buffers and optimizer state of rank 0 are given to every rank (no optimizer step
    is taken), and the optimizer is wrapped. With one process both behave bit for bit as before. In
    an elastic job nothing travels, since a worker that joins calls this while others train: there
    the elastic state's ``sync()`` makes replicas equal.

    Arguments:
        model: any module; it is given back itself, so ``state_dict()`` stays plain.
        optimizer: the optimizer over the model's parameters.
        engine: ``"horovod"`` or ``"ddp"``, as in ``init()``; None is the one that it started. With
            ``"ddp"`` gradients are reduced by PyTorch's ``DistributedDataParallel``, which needs
            the model itself to be called, not only parts of it.
        update: the update rule. None, or ``Synchronous()``, averages gradients before each update.
            With ``LocalSGD(period)`` and ``DiLoCo(period)`` each rank takes steps alone, and
            replicas meet every so many; with ``Asynchronous()`` they never wait for one another,
            and share one set of parameters: see docs/update-rules.md. ``optimizer.replicas_equal``
            then says whether they are equal, ``optimizer.synchronize_replicas()`` makes them so.
        compression: what travels in place of gradients; see :class:`Compression`.
        accumulate: micro-batches per optimizer step. Their gradients are averaged, and a shorter
            last step of an epoch has its true average.
        guard: a :class:`Guard`, which then judges the gradients before each update and compares
            replicas after every ``guard.every``-th. It sees what the model is called with, to tell
            whether that was bad already. ``optimizer.step()`` raises what it raises.
        options: further keyword arguments of :func:`DistributedOptimizer`; with ``"ddp"`` of
            ``DistributedDataParallel``, such as ``bucket_cap_mb``. A model that always uses all
            parameters is a little faster with ``find_unused_parameters=False``.

    Raises ``ValueError`` for an engine or update rule that does not exist or does not go with the
    other options, and for an engine that is not the one of ``init()``, and ``RankMismatch`` on
    every rank when the parameters' names, shapes or dtypes differ between ranks.
    """
    engine = _choose(engine)
    check_engine(engine, offered=("horovod", "ddp"))
    # Wrapped first: it compares the models, so a mismatch is an error and not a broken broadcast.
    if engine == "ddp":
        from hvdsync.torch import ddp

        check_combination(update, engine=engine)
        distributed = ddp.distribute_optimizer(
            model,
            optimizer,
            compression=compression,
            accumulate=accumulate,
            guard=guard,
            options=options,
        )
    else:
        names = {p: name for name, p in model.named_parameters()}
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        distributed = DistributedOptimizer(
            optimizer,
            named_parameters=(
                list(model.named_parameters()) if all(p in names for p in trained) else None
            ),
            compression=compression,
            update=update,
            backward_passes_per_step=accumulate,
            average_passes=accumulate > 1,
            guard=guard,
            **options,
        )
    local = getattr(distributed, "_local", None)
    if local is not None:
        local.buffers = model.named_buffers
    if not launch.is_elastic():
        broadcast_model(model)
        broadcast_optimizer_state(optimizer, root_rank=0)
    if guard is not None:
        guard._attach(model, distributed)
    return model, distributed


def _choose(engine: str | None) -> str:
    started = None
    if world.is_active():
        started = "horovod" if process_group.active() is None else "ddp"
    if engine is None:
        return started or "horovod"
    if engine in ("horovod", "ddp") and started not in (engine, None):
        raise ValueError(
            f"distribute: engine is {engine!r}, but init() started {started!r}; give "
            f"init(engine={engine!r}), or leave engine out here"
        )
    return engine


def broadcast_model(model: torch.nn.Module, root_rank: int = 0) -> None:
    """Give every rank the parameters, buffers and extra state of ``root_rank``'s model."""
    if world.current().size == 1:
        return
    state = model.state_dict()
    tensors = {k: v for k, v in state.items() if torch.is_tensor(v)}
    broadcast_parameters(tensors, root_rank)
    extra = broadcast_state(
        {k: v for k, v in state.items() if k not in tensors}, root_rank, "hvdsync.extra_state"
    )
    if extra and world.current().rank != root_rank:
        model.load_state_dict({**model.state_dict(), **extra})
