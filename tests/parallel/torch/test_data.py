"""Who reads what on several ranks: samplers, streams, files, noise, and results put together."""

import itertools
import logging
import random

import numpy as np
import pytest
import torch

import hvdsync.torch as hvd
from hvdsync import data
from hvdsync.errors import DataError


def everyones(mine):
    """The lists of all ranks in one."""
    return list(itertools.chain.from_iterable(hvd.allgather_object(list(mine))))


@pytest.mark.parametrize(("uneven", "batches"), [("pad", 11), ("drop", 10)])
def test_batches_that_do_not_divide_end_on_all_ranks_by_a_policy_that_is_logged(
    uneven, batches, caplog, several_ranks
):
    size = hvd.size()
    samples = 10 * 2 * size + 1  # one more than whole batches of two
    plain = torch.nn.Linear(3, 1)
    model, optimizer = hvd.distribute(plain, torch.optim.SGD(plain.parameters(), 0.1))
    sampler = hvd.DistributedSampler(samples, uneven=uneven)
    rows = torch.arange(samples * 3, dtype=torch.float32).reshape(-1, 3) / (3 * samples)
    dataset = torch.utils.data.TensorDataset(rows, rows.sum(1, keepdim=True))
    taken = 0
    with caplog.at_level(logging.INFO, "hvdsync.data.sampler"):
        for x, y in torch.utils.data.DataLoader(dataset, batch_size=2, sampler=sampler):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            taken += 1
    assert taken == batches
    if hvd.rank() == 0:
        assert f"{samples} samples on {size} ranks, uneven={uneven}" in caplog.text
    else:
        assert not caplog.text


def test_evaluation_counts_each_sample_once_and_gives_results_in_order():
    # Five samples, the first one wrong: four of five are right at any number of ranks.
    right = np.array([0.0, 1.0, 1.0, 1.0, 1.0])
    own = list(hvd.DistributedSampler(5, shuffle=False, uneven="exact"))
    mean = float(right[own].mean()) if own else 0.0
    accuracy = hvd.average_metrics({"accuracy": mean}, weight=len(own))["accuracy"]
    assert accuracy == pytest.approx(0.8, abs=1e-12)

    shuffled = list(hvd.DistributedSampler(5, seed=3, uneven="exact"))
    scores = np.stack([right, 10 * np.arange(5)], axis=1)
    np.testing.assert_array_equal(data.gather_in_order(scores[shuffled], shuffled), scores)
    # Padding reads some twice; each still has one result.
    padded = list(hvd.DistributedSampler(5, uneven="pad"))
    np.testing.assert_array_equal(data.gather_in_order(right[padded], padded, length=5), right)


def test_missing_results_are_an_error_on_every_rank():
    own = list(hvd.DistributedSampler(7, shuffle=False, uneven="exact"))
    kept = [index for index in own if index != 4]
    with pytest.raises(DataError, match=r"1 of 7 samples have no result \(4\)"):
        data.gather_in_order(np.zeros(len(kept)), kept, length=7)


def test_epochs_have_new_orders_without_being_told_and_ranks_stay_disjoint():
    sampler = hvd.DistributedSampler(24, seed=1)
    loader = torch.utils.data.DataLoader(range(24), batch_size=2, sampler=sampler)
    epochs = []
    for _ in range(3):
        mine = torch.cat(list(loader)).tolist()
        assert sorted(everyones(mine)) == sorted(list(range(24)) + everyones_padding(mine))
        epochs.append(mine)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def everyones_padding(mine):
    """What is read twice: nothing where 24 divides by the number of ranks."""
    counts = np.bincount(everyones(mine), minlength=24)
    assert counts.sum() == 24 + -24 % hvd.size()
    return np.repeat(np.arange(24), counts - 1).tolist()


def test_every_file_of_a_shuffled_list_is_read_once():
    files = [f"part-{i:02d}" for i in range(13)]
    orders = []
    for epoch in range(3):
        # Each rank finds them in another order on its disk.
        found = random.Random(hvd.rank()).sample(files, len(files))
        mine = data.shard_files(found, epoch)
        everyone = everyones(mine)
        assert sorted(everyone) == files
        orders.append(everyone)
    assert orders[0] != orders[1] != orders[2]


class Stream(torch.utils.data.IterableDataset):
    """Numbers; each reader takes its own."""

    def __init__(self, length, uneven):
        self.length, self.uneven = length, uneven

    def __iter__(self):
        return data.worker_shard(range(self.length), self.uneven)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_gives_each_sample_once_over_ranks_and_loader_workers(workers):
    length = 37

    def read(uneven):
        loader = torch.utils.data.DataLoader(
            Stream(length, uneven), batch_size=None, num_workers=workers
        )
        return [int(sample) for sample in loader]

    assert sorted(everyones(read("exact"))) == list(range(length))
    readers = hvd.size() * max(workers, 1)
    padded, dropped = read("pad"), read("drop")
    assert len(padded) == max(workers, 1) * -(-length // readers)
    assert set(everyones(padded)) == set(range(length))
    assert sorted(everyones(dropped)) == list(range(length - length % readers))


def test_noise_of_a_fixed_seed_differs_between_ranks_and_repeats(several_ranks):
    def noise():
        torch.manual_seed(data.rank_seed(5))
        generator = np.random.default_rng(data.rank_seed(5))
        return [*torch.rand(4).tolist(), *generator.random(4).tolist()]

    first = noise()
    assert first == noise()
    everyone = hvd.allgather_object(first)
    for one, other in itertools.combinations(everyone, 2):
        assert all(a != b for a, b in zip(one, other, strict=True))
    assert data.rank_seed(5) != data.rank_seed(6)


def test_a_loader_that_reads_ahead_resumes_behind_what_was_trained_on():
    length, size = 40 * hvd.size(), hvd.size()
    sampler = hvd.DistributedSampler(length, seed=2)
    loader = torch.utils.data.DataLoader(
        range(length), batch_size=4, sampler=sampler, num_workers=1, prefetch_factor=4
    )
    batches = iter(loader)
    trained = torch.cat([next(batches) for _ in range(3)]).tolist()
    assert sampler.state_dict()["cursor"] > 12 * size  # the worker is ahead
    state = sampler.state_dict(consumed=len(trained))
    assert state["cursor"] == 12 * size
    del batches

    resumed = hvd.DistributedSampler(length, seed=2)
    resumed.load_state_dict(state)
    assert sorted(everyones([*trained, *resumed])) == list(range(length))
