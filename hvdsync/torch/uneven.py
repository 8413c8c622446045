"""Ranks with unequal numbers of batches, in PyTorch: a loader in, batches that end together out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvdsync.data.uneven import EvenBatches, Policy
from hvdsync.torch.optimizer import _DistributedOptimizer


def even_batches(
    batches: Iterable[Any],
    policy: Policy = "min",
    *,
    optimizer: torch.optim.Optimizer | None = None,
    update: Callable[[], Any] | None = None,
    weight: Callable[[Any], float] | None = None,
) -> EvenBatches:
    """Batches that end on all ranks after the same step, whichever rank has more of them.

    ```python
    batches = hvd.even_batches(loader, policy="pad")
    for x, y in batches:
        optimizer.zero_grad()
        (loss_of(model(x), y) * batches.scale).backward()
        optimizer.step()
    ```

    Arguments:
        batches: a loader or any iterable; each loop over the result is one over it.
        policy: ``"min"`` ends when the first rank has no more; batches are left out.
            ``"pad"`` ends when the last one has no more; a rank that ran out repeats its last batch
            with the factor 0. ``"join"`` ends likewise, but a rank that ran out does not run the
            loop's body: it takes part in each step with nothing, and makes the same update. Where
            the model itself communicates, as ``SyncBatchNorm`` does, only "min" is exact.
        optimizer: the distributed optimizer, for "join"; with one backward pass per step.
        update: for "join", what the loop does from ``backward()`` on, where that is more than
            ``optimizer.step()``: clip, step, and advance the schedule. It finds reduced gradients.
        weight: what a batch counts, given the batch: by default its number of samples, which is
            the length of its first tensor; tokens, for instance.

    With "pad" and "join" multiply the loss, a mean over the batch, by ``scale`` of the result: the
    step then is that of one process on the samples of all ranks. A step in which it was not read,
    although it was not 1, is an ``HvdsyncError`` on every rank.

    On the wire: with "min" one all-gather of 8 bytes a rank, where all ranks know their length;
    otherwise 24 bytes a rank and step. Rank 0 logs which policy it was and what it did. An error in
    reading a batch, where ranks ask at each step, is raised on all, and names the rank. Raises
    ``DataError`` on every rank when a rank has no batch to repeat.
    """
    return EvenBatches(
        batches,
        policy,
        weight=weight,
        step_with_nothing=None if optimizer is None else _nothing(policy, optimizer, update),
    )


def _nothing(
    policy: Policy, optimizer: Any, update: Callable[[], Any] | None
) -> Callable[[], None]:
    if policy == "join":
        _refuse(optimizer)

    def step_with_nothing() -> None:
        optimizer.zero_grad()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            (update or optimizer.step)()

    return step_with_nothing


def _refuse(optimizer: Any) -> None:
    if not isinstance(optimizer, _DistributedOptimizer):
        raise ValueError(
            f"even_batches: policy='join' found a plain {type(optimizer).__name__}; expected the "
            "distributed one that hvd.distribute gives back"
        )
    passes = 1 if optimizer._reducer is None else optimizer._reducer.passes
    if passes != 1:
        raise ValueError(
            f"even_batches: policy='join' found {passes} backward passes per step, of which a rank "
            "without batches knows nothing; expected 1. policy='pad' works with any number"
        )
