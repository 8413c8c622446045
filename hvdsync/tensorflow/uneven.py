"""Ranks with unequal numbers of batches, in TensorFlow: data in, batches that end together out.

For loops of one's own; Keras's ``fit`` takes what ``hvdsync.keras.even_batches`` gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvdsync.data.uneven import EvenBatches, Policy
from hvdsync.sync.keras_optimizer import sharing_of


def even_batches(
    batches: Iterable[Any],
    policy: Policy = "min",
    *,
    optimizer: Any = None,
    weight: Callable[[Any], float] | None = None,
) -> EvenBatches:
    """Batches that end on all ranks after the same step, whichever rank has more of them.

    ```python
    batches = hvd.even_batches(dataset, policy="pad")
    for x, y in batches:
        train_step(x, y, batches.scale)  # loss_of(model(x), y) * scale
    ```

    Arguments:
        batches: a ``tf.data.Dataset`` or any iterable; each loop over the result is one over it.
        policy: ``"min"`` ends when the first rank has no more; batches are left out.
            ``"pad"`` ends when the last one has no more; a rank that ran out repeats its last batch
            with the factor 0. ``"join"`` ends likewise, but a rank that ran out does not run the
            loop's body: it takes part in each step with nothing, and makes the same update. Where
            the model itself communicates, as ``SyncBatchNormalization`` does, only "min" is exact.
        optimizer: the distributed optimizer, for "join"; one update per backward pass.
        weight: what a batch counts, given the batch: by default its number of samples, which is
            the length of its first tensor; tokens, for instance.

    With "pad" and "join" multiply the loss, a mean over the batch, by ``scale`` of the result, a
    float32 tensor: the step then is that of one process on the samples of all ranks. A step in
    which it was not read, although it was not 1, is an ``HvdsyncError`` on every rank; so it is
    read outside of a ``tf.function``, and given to it.

    On the wire: with "min" one all-gather of 8 bytes a rank, where all ranks know their length;
    otherwise 24 bytes a rank and step. Rank 0 logs which policy it was and what it did. An error in
    reading a batch, where ranks ask at each step, is raised on all, and names the rank. Raises
    ``DataError`` on every rank when a rank has no batch to repeat, or none before it joins.
    """
    return EvenBatches(
        batches,
        policy,
        weight=weight,
        step_with_nothing=None if optimizer is None else _nothing(policy, optimizer),
        # What others reduce in a graph is known from a step of one's own only.
        from_start=False,
        as_scale=lambda scale: tf.constant(scale, tf.float32),
    )


def _nothing(policy: Policy, optimizer: Any) -> Callable[[], None]:
    sharing = sharing_of(optimizer)
    if policy == "join" and sharing is None:
        raise ValueError(
            f"even_batches: policy='join' found a plain {type(optimizer).__name__}; expected the "
            "distributed one that hvd.distribute gives back. With a DistributedGradientTape use "
            "policy='pad'"
        )
    if policy == "join" and sharing is not None and sharing.accumulation is not None:
        raise ValueError(
            "even_batches: policy='join' found an optimizer that adds up several backward passes, "
            "of which a rank without batches knows nothing; policy='pad' works with any number"
        )

    if policy == "join" and sharing is not None and sharing.local_steps is not None:
        raise ValueError(
            "even_batches: policy='join' found an optimizer whose ranks take steps alone, of which "
            "a rank without batches has none; policy='pad' and 'min' work with it"
        )

    def step_with_nothing() -> None:
        assert sharing is not None
        sharing.reducer.repeat_with_nothing(optimizer.apply)  # type: ignore[attr-defined]

    return step_with_nothing
