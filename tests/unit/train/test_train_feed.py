"""Every sample of an epoch is trained on once, and weights make means over samples exact."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdsync.data.arrays import Dataset, make_dataset
from hvdsync.data.sampler import DistributedSampler
from hvdsync.train.feed import Batch, Epoch, evaluation_batches, evaluation_share


def numbered(length: int, tests: int = 4) -> Dataset:
    """A data set whose image i has the one pixel i."""
    x = np.arange(length, dtype=np.float32).reshape(length, 1, 1)
    x_test = np.arange(tests, dtype=np.float32).reshape(tests, 1, 1)
    return make_dataset(
        "numbered", x, np.zeros(length, np.int64), x_test, np.zeros(tests, np.int64)
    )


def sampler(length: int) -> DistributedSampler:
    return DistributedSampler(length, seed=1, uneven="exact")


CASES = [
    # length, ranks, batch size, accumulate
    (60, 1, 8, 1),
    (64, 4, 8, 1),
    (61, 4, 8, 1),
    (33, 4, 8, 1),  # one rank has a pass more than the others
    (63, 3, 4, 2),
    (50, 2, 8, 3),  # passes are filled up to a multiple of three
    (5, 2, 1, 1),
    (3, 4, 2, 1),  # a rank without any sample
    (1, 3, 2, 2),
]


@pytest.mark.parametrize(("length", "ranks", "batch_size", "accumulate"), CASES)
def test_each_sample_counts_once_and_equally(
    pretend: Callable[..., None], length: int, ranks: int, batch_size: int, accumulate: int
) -> None:
    dataset = numbered(length)
    epochs: list[Epoch] = []
    passes: list[list[Batch]] = []
    for rank in range(ranks):
        pretend(rank, ranks)
        epochs.append(Epoch(dataset, sampler(length), batch_size, accumulate))
        passes.append(list(epochs[-1]))

    assert len({epoch.passes for epoch in epochs}) == 1
    assert {len(batches) for batches in passes} == {epochs[0].passes}
    assert epochs[0].passes == epochs[0].steps * accumulate

    seen: Counter[float] = Counter()
    for step in range(epochs[0].steps):
        span = range(step * accumulate, (step + 1) * accumulate)
        batches = [batches[i] for batches in passes for i in span]
        values = np.concatenate([b.images.ravel() for b in batches])
        weights = np.concatenate([b.weights for b in batches])
        real = weights > 0
        # What each rank computes, averaged over ranks and passes, is the mean over samples.
        averaged = (values * weights).sum() / (ranks * accumulate)
        assert averaged == pytest.approx(values[real].mean(), rel=1e-5)
        assert real.sum() == sum(epochs[0].samples[i] for i in span)
        seen.update(values[real].tolist())
    assert seen == Counter(float(i) for i in range(length))

    for epoch, batches in zip(epochs, passes, strict=True):
        assert epoch.own_samples == [int((b.weights > 0).sum()) for b in batches]
        assert all(len(b.images) == len(b.labels) == len(b.weights) for b in batches)
    assert epochs[0].samples == [
        sum(epoch.own_samples[i] for epoch in epochs) for i in range(epochs[0].passes)
    ]


def test_epochs_follow_one_another_without_being_told(pretend: Callable[..., None]) -> None:
    pretend(0, 2)
    order = sampler(10)
    dataset = numbered(10)
    numbers, orders = [], []
    for _ in range(3):
        epoch = Epoch(dataset, order, 2, 1)
        numbers.append(epoch.number)
        orders.append(np.concatenate([b.images.ravel() for b in epoch]).tolist())
    assert numbers == [0, 1, 2]
    assert orders[0] != orders[1] != orders[2]


def test_a_saved_epoch_is_the_next_one_after_its_last_pass(pretend: Callable[..., None]) -> None:
    pretend(1, 2)
    order = sampler(7)
    list(Epoch(numbered(7), order, 2, 2))
    assert order.state_dict()["epoch"] == 1
    assert order.state_dict()["cursor"] == 0


def test_the_rest_of_an_epoch_is_fed_to_another_number_of_ranks(
    pretend: Callable[..., None],
) -> None:
    dataset = numbered(20)
    pretend(0, 2)
    order = sampler(20)
    first = next(iter(Epoch(dataset, order, 3, 1)))
    state = order.state_dict()
    assert state["cursor"] == 6  # of both ranks

    rest: list[float] = []
    for rank in range(3):
        pretend(rank, 3)
        order = sampler(20)
        order.load_state_dict(state)
        epoch = Epoch(dataset, order, 3, 1)
        assert sum(epoch.samples) == 14
        rest += [v for b in epoch for v in b.images.ravel()[b.weights > 0].tolist()]
    assert len(set(rest)) == 14
    assert not set(rest) & set(first.images.ravel().tolist())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_each_test_sample_is_evaluated_by_one_rank(
    pretend: Callable[..., None], ranks: int
) -> None:
    dataset = numbered(4, tests=5)
    evaluated: list[float] = []
    for rank in range(ranks):
        pretend(rank, ranks)
        for images, labels in evaluation_batches(dataset, evaluation_share(dataset)):
            assert len(images) == len(labels)
            evaluated += images.ravel().tolist()
    assert sorted(evaluated) == [0, 1, 2, 3, 4]


def pictures(length: int) -> Dataset:
    """A data set of images of 16 x 16 random pixels."""
    x = np.random.default_rng(1).random((length, 16, 16), np.float32)
    labels = np.arange(length)
    return make_dataset("pictures", x, labels, x[:1], labels[:1])


def augmented(pretend: Callable[..., None], ranks: int, state: Any = None) -> dict[int, bytes]:
    """What each sample (by its label) looks like in the epoch that the state is in."""
    looks = {}
    for rank in range(ranks):
        pretend(rank, ranks)
        order = sampler(50)
        if state is not None:
            order.load_state_dict(state)
        for batch in Epoch(pictures(50), order, 4, 1, augment=True):
            for image, label in zip(batch.images, batch.labels, strict=True):
                looks[int(label)] = image.tobytes()
    return looks


def test_a_sample_is_shifted_alike_at_any_number_of_ranks_and_after_a_resume(
    pretend: Callable[..., None],
) -> None:
    alone = augmented(pretend, 1)
    assert augmented(pretend, 3) == alone
    state = {**sampler(50).state_dict(), "cursor": 20}
    rest = augmented(pretend, 2, state)
    assert len(rest) == 30
    assert rest.items() <= alone.items()
    # Another epoch, other shifts; and they are no plain images.
    other = augmented(pretend, 1, {**state, "cursor": 0, "epoch": 1})
    plain = {i: image.tobytes() for i, image in enumerate(pictures(50).x_train)}
    assert sum(alone[i] == other[i] for i in alone) < 20
    assert sum(alone[i] == plain[i] for i in alone) < 20


def test_what_was_read_ahead_does_not_count_as_trained(pretend: Callable[..., None]) -> None:
    pretend(0, 2)
    order = sampler(61)
    epoch = Epoch(numbered(61), order, 8, 1)
    list(epoch)  # as Keras reads it, all at once
    assert epoch.state_after(0)["cursor"] == 0
    assert epoch.state_after(2)["cursor"] == 32
    assert (epoch.state_after(4)["epoch"], epoch.state_after(4)["cursor"]) == (1, 0)

    rest = sampler(61)
    rest.load_state_dict(epoch.state_after(2))
    after = Epoch(numbered(61), rest, 8, 1)
    assert (after.samples_before, after.steps_before, after.steps_in_whole) == (32, 2, 4)
    assert (after.number, after.passes, after.state_after(0)["cursor"]) == (0, 2, 32)
    nothing = Epoch(numbered(61), order, 8, 1, trained=True)
    assert (nothing.number, nothing.passes, nothing.samples_before) == (0, 0, 61)
    assert list(nothing) == []
