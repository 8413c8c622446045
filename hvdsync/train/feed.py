"""Who trains on what: a data set and a sampler in, the batches of each epoch out.

All frameworks get the same NumPy batches, in the same order, with a weight for each sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdsync.comm import verbs
from hvdsync.data import augmentation
from hvdsync.data.arrays import Array, Dataset
from hvdsync.data.order import share_size
from hvdsync.data.sampler import DistributedSampler

# Large enough to keep every core busy, small enough for any memory.
EVALUATION_BATCH = 500


@dataclass(frozen=True)
class Batch:
    """One backward pass of one rank: float32 (B, H, W, C), int64 (B,), float32 (B,).

    ``sum(weights * losses)``, averaged over ranks and over the passes of a step, is the mean loss
    of all samples of the step. A weight of 0 marks a sample that stands in where a rank has none.
    """

    images: Array
    labels: Array
    weights: Array


class Epoch:
    """The passes of one rank in one epoch, or in the rest of one; as many on every rank.

    Each sample of the epoch is read once by one rank. Where samples do not divide evenly, batches
    are shorter or hold a stand-in of weight 0, and weights keep the average one over samples.
    ``samples[i]`` is how many samples all ranks together read in pass ``i``, ``own_samples[i]``
    how many this rank reads; ``passes`` is a multiple of ``accumulate``, the passes of one
    optimizer step.

    With ``augment`` images are shifted at random, each sample by its own noise of this epoch. With
    ``trained`` the epoch before the sampler's is meant, of which no pass is left. ``watch`` is
    given the batches and gives them on, to measure how long they take.
    """

    def __init__(
        self,
        dataset: Dataset,
        sampler: DistributedSampler,
        batch_size: int,
        accumulate: int,
        *,
        augment: bool = False,
        trained: bool = False,
        watch: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
    ) -> None:
        self.accumulate = accumulate
        self.number = sampler.epoch - trained
        self._dataset = dataset
        self._sampler = sampler
        self._augment = augment
        self._watch = watch
        self.batch_size = batch_size
        state = sampler.state_dict()
        cursor = sampler.length if trained else state["cursor"]
        self._before = {**state, "epoch": self.number, "cursor": cursor}
        self._ranks = verbs.size()
        shares = [
            share_size(sampler.length, cursor, rank, self._ranks, "exact")
            for rank in range(self._ranks)
        ]
        self.passes = _passes(max(shares), batch_size, accumulate)
        counts = [
            [min(batch_size, max(0, share - i * batch_size)) for share in shares]
            for i in range(self.passes)
        ]
        self.samples = [sum(count) for count in counts]
        self.own_samples = [count[verbs.rank()] for count in counts]

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return self.passes // self.accumulate

    @property
    def samples_before(self) -> int:
        """How many samples of the epoch were read before this rest of it."""
        return int(self._before["cursor"])

    @property
    def steps_before(self) -> int:
        """How many optimizer steps that is, at this number of ranks."""
        return self.samples_before // (self.batch_size * self._ranks * self.accumulate)

    @property
    def steps_in_whole(self) -> int:
        """Optimizer steps of the epoch from its beginning, at this number of ranks."""
        share = share_size(self._sampler.length, 0, 0, self._ranks, "exact")
        return _passes(share, self.batch_size, self.accumulate) // self.accumulate

    def state_after(self, passes: int) -> dict[str, Any]:
        """The sampler's state once ``passes`` passes of this are done, whatever was read ahead."""
        if not passes:
            return dict(self._before)
        return self._sampler.state_dict(consumed=sum(self.own_samples[:passes]))

    def __iter__(self) -> Iterator[Batch]:
        return self._watch(self._batches())

    def _batches(self) -> Iterator[Batch]:
        noise = None
        if self._augment and self.passes:
            noise = augmentation.sample_noise(self._sampler.length, self._sampler.seed, self.number)
        batches = self._sampler.epoch_batches(self.batch_size)
        for i in range(self.passes):
            first = i - i % self.accumulate
            step = sum(self.samples[first : first + self.accumulate])
            weight = np.float32(self._ranks * self.accumulate / step)
            indices = next(batches, None)
            if indices is None or len(indices) == 0:
                indices, weight = np.zeros(1, np.int64), np.float32(0)
            images, labels = self._dataset.train_batch(indices)
            if noise is not None:
                images = augmentation.shift_randomly(images, noise[indices])
            yield Batch(images, labels, np.full(len(indices), weight, np.float32))


def _passes(samples: int, batch_size: int, accumulate: int) -> int:
    """Passes over ``samples`` samples of one rank, filled up to whole optimizer steps."""
    passes = -(-samples // batch_size)
    return -(-passes // accumulate) * accumulate


def evaluation_share(dataset: Dataset) -> Any:
    """The indices of the test samples that this rank evaluates; each sample is one rank's."""
    sampler = DistributedSampler(len(dataset.x_test), shuffle=False, uneven="exact")
    return np.fromiter(sampler, np.int64)


def evaluation_batches(dataset: Dataset, indices: Any) -> Iterator[tuple[Array, Array]]:
    """The test samples at ``indices``: float32 (B, H, W, C) and int64 (B,)."""
    for first in range(0, len(indices), EVALUATION_BATCH):
        yield dataset.test_batch(indices[first : first + EVALUATION_BATCH])
