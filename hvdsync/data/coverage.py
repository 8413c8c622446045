"""How often each sample is read: a length and the runs that share an epoch in, counts out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdsync.data.order import Uneven
from hvdsync.data.sampler import DistributedSampler
from hvdsync.errors import DataError

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Leg:
    """A run on ``ranks`` workers that is ended when each has consumed ``batches`` batches.

    None: it reads the epoch to its end.
    """

    ranks: int
    batches: int | None = None


def simulate(
    length: int,
    legs: Sequence[Leg],
    *,
    batch_size: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    uneven: Uneven = "pad",
    epochs: int = 1,
) -> Counts:
    """How often ``DistributedSampler`` gives each sample to be trained on: int64 (length,).

    In each epoch the legs follow one another, each resumed from the state that the one before
    saved on its rank 0; the last leg reads to the end. Nothing travels. Raises :class:`DataError`
    when legs are left over, or the last one does not end.
    """
    if not legs or legs[-1].batches is not None:
        raise DataError("the last of the runs must read the epoch to its end")
    counts: Counts = np.zeros(length, np.int64)
    state = None
    for epoch in range(epochs):
        for leg in legs:
            samplers = [
                DistributedSampler(length, shuffle, seed, uneven, rank=rank, size=leg.ranks)
                for rank in range(leg.ranks)
            ]
            saved = None
            for sampler in samplers:
                if state is not None:
                    sampler.load_state_dict(state)
                if sampler.epoch != epoch:
                    raise DataError(
                        f"the runs before the one on {leg.ranks} workers have read the whole epoch"
                    )
                consumed = 0
                for i, indices in enumerate(sampler.epoch_batches(batch_size)):
                    if i == leg.batches:  # read ahead, and lost with the run
                        break
                    consumed += len(indices)
                    np.add.at(counts, indices, 1)
                # Rank 0 never has fewer than others, so its state is the one to keep.
                saved = saved or sampler.state_dict(consumed=consumed)
            state = saved
    return counts


def describe(counts: Counts) -> list[tuple[int, int]]:
    """(how often, how many samples) for each number of times that occurs, in rising order."""
    times, samples = np.unique(counts, return_counts=True)
    return [(int(t), int(n)) for t, n in zip(times, samples, strict=True)]
