"""In: lengths, world sizes, cuts. Out: proof that every sample is read as often as promised."""

from __future__ import annotations

import itertools
import json
import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdsync.comm import world
from hvdsync.data import DistributedSampler
from hvdsync.data.order import Uneven, advance, global_order, share, share_size
from hvdsync.errors import DataError

LENGTHS = (1, 2, 5, 12, 17)
SIZES = (1, 2, 3, 4, 7)


def _world(length: int, size: int, **options: Any) -> list[DistributedSampler]:
    return [DistributedSampler(length, rank=rank, size=size, **options) for rank in range(size)]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", SIZES)
def test_shares_cover_the_rest_of_an_epoch_as_each_policy_says(length: int, size: int) -> None:
    for cursor in range(length + 1):
        rest = list(range(cursor, length))
        shares: dict[Uneven, list[list[int]]] = {
            uneven: [share(length, cursor, rank, size, uneven).tolist() for rank in range(size)]
            for uneven in ("exact", "drop", "pad")
        }
        assert sorted(itertools.chain(*shares["exact"])) == rest
        counts = [len(positions) for positions in shares["exact"]]
        assert max(counts) - min(counts) <= 1
        assert counts == sorted(counts, reverse=True)

        assert len({len(positions) for positions in shares["drop"]}) == 1
        assert sorted(itertools.chain(*shares["drop"])) == rest[: len(rest) // size * size]

        assert len({len(positions) for positions in shares["pad"]}) == 1
        read = list(itertools.chain(*shares["pad"]))
        extra = -len(rest) % size
        expected = Counter(rest) + Counter(position % length for position in range(extra))
        assert Counter(read) == expected

        for uneven, parts in shares.items():
            for rank, positions in enumerate(parts):
                assert len(positions) == share_size(length, cursor, rank, size, uneven)


@pytest.mark.parametrize(
    ("length", "size1", "size2"), list(itertools.product(LENGTHS, SIZES, SIZES))
)
def test_resuming_at_another_size_reads_each_sample_once(
    length: int, size1: int, size2: int
) -> None:
    for steps in range(length // size1 + 1):
        first = [share(length, 0, rank, size1, "exact")[:steps] for rank in range(size1)]
        cursor = advance(length, 0, steps, size1)
        rest = [share(length, cursor, rank, size2, "exact") for rank in range(size2)]
        assert sorted(np.concatenate(first + rest).tolist()) == list(range(length))


def test_the_order_is_a_permutation_that_depends_on_seed_and_epoch_only() -> None:
    orders = [tuple(global_order(50, seed, epoch)) for seed in range(5) for epoch in range(5)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 25
    assert orders[7] == tuple(global_order(50, 1, 2))
    assert global_order(6, 3, 4, shuffle=False).tolist() == [0, 1, 2, 3, 4, 5]


def test_the_order_stays_the_same_across_releases() -> None:
    # A checkpoint's cursor means these very samples: do not change the numbers, mend the code.
    assert global_order(10, 0, 0).tolist() == [1, 4, 5, 6, 8, 2, 0, 3, 9, 7]
    assert global_order(10, 2**70, 3).tolist() == [7, 3, 4, 5, 9, 2, 1, 6, 8, 0]


def test_the_first_sample_is_equally_likely_to_be_any() -> None:
    firsts = Counter(int(global_order(8, 5, epoch)[0]) for epoch in range(4000))
    assert set(firsts) == set(range(8))
    assert all(400 < count < 600 for count in firsts.values())


def test_three_epochs_without_set_epoch_have_three_orders_and_disjoint_shards() -> None:
    samplers = _world(20, 2, seed=9)
    orders = []
    for _ in range(3):
        parts = [list(sampler) for sampler in samplers]
        assert not set(parts[0]) & set(parts[1])
        assert sorted(parts[0] + parts[1]) == list(range(20))
        orders.append(tuple(parts[0]))
    assert len(set(orders)) == 3


def test_another_seed_gives_another_order_and_no_shuffle_the_stored_one() -> None:
    assert list(_world(30, 1, seed=1)[0]) != list(_world(30, 1, seed=2)[0])
    samplers = _world(7, 2, shuffle=False, uneven="exact")
    for _ in range(2):
        assert [list(sampler) for sampler in samplers] == [[0, 2, 4, 6], [1, 3, 5]]


def test_evaluating_five_samples_on_four_ranks_counts_each_once() -> None:
    right = [False, True, True, True, True]
    for size in (1, 2, 3, 4, 5, 8):
        read = [list(s) for s in _world(5, size, shuffle=False, uneven="exact")]
        assert sorted(itertools.chain(*read)) == [0, 1, 2, 3, 4]
        assert sum(right[index] for part in read for index in part) / 5 == 0.8


def test_ranks_end_together_where_the_length_does_not_divide() -> None:
    for uneven, expected in (("pad", 11), ("drop", 10)):
        samplers = _world(21, 2, uneven=uneven)
        assert [len(sampler) for sampler in samplers] == [expected] * 2
        assert [len(list(sampler)) for sampler in samplers] == [expected] * 2


def test_rank_0_logs_the_policy_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for sampler in _world(21, 2, uneven="pad"):
            list(sampler), list(sampler)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == "21 samples on 2 ranks, uneven=pad: 1 of them are read twice"


def test_dropping_everything_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert list(_world(3, 4, uneven="drop")[0]) == []
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_set_epoch_pins_the_next_epoch() -> None:
    sampler, other = _world(30, 1)[0], _world(30, 1)[0]
    orders = [list(sampler) for _ in range(4)]
    for epoch in (2, 0, 3):
        other.set_epoch(epoch)
        assert other.epoch == epoch
        assert list(other) == orders[epoch]
    other.set_epoch(1)
    assert [list(other), list(other)] == orders[1:3]


def test_a_half_read_epoch_is_followed_by_the_next_one() -> None:
    sampler, other = _world(30, 1)[0], _world(30, 1)[0]
    orders = [list(other) for _ in range(2)]
    assert list(itertools.islice(sampler, 7)) == orders[0][:7]
    assert list(sampler) == orders[1]


def test_an_iterator_that_nobody_reads_uses_up_no_epoch() -> None:
    sampler, other = _world(30, 1)[0], _world(30, 1)[0]
    iter(sampler), iter(sampler)
    assert list(sampler) == list(other)


@pytest.mark.parametrize(("size1", "size2"), [(4, 4), (4, 3), (2, 5), (3, 1), (1, 4)])
@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
def test_resume_reads_the_rest_of_the_epoch_and_then_the_next(
    size1: int, size2: int, uneven: Uneven
) -> None:
    length, steps = 25, 5
    options: dict[str, Any] = {"seed": 6, "uneven": uneven}
    first = _world(length, size1, **options)
    list(map(list, first))  # epoch 0; the cut is in epoch 1
    read = [index for sampler in first for index in itertools.islice(sampler, steps)]
    state = json.loads(json.dumps(first[0].state_dict()))
    assert (state["epoch"], state["cursor"]) == (1, steps * size1)

    second = _world(length, size2, **options)
    for sampler in second:
        sampler.load_state_dict(state)
    sizes = [len(sampler) for sampler in second]
    rest = [list(sampler) for sampler in second]
    assert [len(part) for part in rest] == sizes
    counts = Counter(read + [index for part in rest for index in part])
    left = length - steps * size1
    if uneven == "exact":
        assert counts == Counter(range(length))
    elif uneven == "drop":
        assert max(counts.values()) == 1
        assert sum(counts.values()) == length - left % size2
    else:
        assert set(counts) == set(range(length))
        assert sum(counts.values()) == length + -left % size2

    whole = global_order(length, 6, 2)
    assert list(second[0]) == whole[share(length, 0, 0, size2, uneven)].tolist()


def test_consumed_corrects_a_loader_that_reads_ahead() -> None:
    sampler = _world(40, 2)[0]
    assert len(list(sampler)) == 20  # all read ahead, four trained on
    assert sampler.state_dict(consumed=4) == {
        "version": 1,
        "length": 40,
        "shuffle": True,
        "seed": 0,
        "uneven": "pad",
        "epoch": 0,
        "cursor": 8,
    }
    ended = sampler.state_dict(consumed=20)
    assert (ended["epoch"], ended["cursor"]) == (1, 0)
    assert sampler.state_dict() == ended
    with pytest.raises(DataError, match="consumed=21, expected at most 20"):
        sampler.state_dict(consumed=21)


def test_consumed_counts_from_the_resume_on() -> None:
    sampler = _world(40, 2)[0]
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "cursor": 10})
    assert sampler.state_dict(consumed=0)["cursor"] == 10
    list(sampler)
    state = sampler.state_dict(consumed=3)
    assert (state["epoch"], state["cursor"]) == (3, 16)


@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
def test_a_finished_epoch_resumes_with_the_next_whole_one(uneven: Uneven) -> None:
    sampler = _world(11, 4, uneven=uneven)[0]
    list(sampler)
    (other,) = _world(11, 1, uneven=uneven)
    other.load_state_dict(sampler.state_dict())
    assert other.epoch == 1
    assert list(other) == global_order(11, 0, 1).tolist()


def test_set_epoch_with_the_saved_epoch_keeps_the_place() -> None:
    sampler = _world(30, 1)[0]
    order = list(itertools.islice(sampler, 30))
    state = {**sampler.state_dict(), "epoch": 0, "cursor": 12}
    sampler.load_state_dict(state)
    sampler.set_epoch(0)
    assert list(sampler) == order[12:]
    sampler.load_state_dict(state)
    sampler.set_epoch(5)
    assert len(list(sampler)) == 30


@pytest.mark.parametrize(
    ("key", "value"),
    [("length", 31), ("seed", 1), ("shuffle", False), ("version", 2), ("cursor", 99)],
)
def test_a_state_of_another_run_is_refused_with_both_values(key: str, value: Any) -> None:
    sampler = _world(30, 1)[0]
    state = {**sampler.state_dict(), key: value}
    with pytest.raises(DataError, match=rf"found (the )?{key} {value}.*expected"):
        sampler.load_state_dict(state)
    del state[key]
    with pytest.raises(DataError, match=f"no {key}"):
        sampler.load_state_dict(state)
    assert list(sampler) == global_order(30, 0, 0).tolist()


def test_the_world_is_looked_up_when_an_epoch_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = DistributedSampler(12)
    for epoch, (rank, size) in enumerate([(0, 1), (1, 2), (2, 3)]):
        here = SimpleNamespace(rank=rank, size=size)
        monkeypatch.setattr(world, "current", lambda here=here: here)
        assert len(sampler) == 12 // size
        assert list(sampler) == global_order(12, 0, epoch)[rank::size].tolist()


def test_batches_are_the_same_indices_in_arrays() -> None:
    sampler, other = _world(23, 2)[1], _world(23, 2)[1]
    for drop_last, sizes in ((False, [5, 5, 2]), (True, [5, 5])):
        batches = list(sampler.epoch_batches(5, drop_last))
        assert [len(batch) for batch in batches] == sizes
        assert np.concatenate(batches).tolist() == list(other)[: sum(sizes)]
        assert all(batch.dtype == np.int64 for batch in batches)


def test_the_state_between_batches_counts_those_given_out() -> None:
    sampler = _world(24, 2)[0]
    batches = sampler.epoch_batches(5, drop_last=True)
    seen = []
    for _ in batches:
        state = sampler.state_dict()
        seen.append((state["epoch"], state["cursor"]))
    assert seen == [(0, 10), (1, 0)]
    assert list(sampler.epoch_batches(13, drop_last=True)) == []
    assert sampler.state_dict()["epoch"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": -1}, "length=-1"),
        ({"data": 0}, "0 samples"),
        ({"data": 2.5}, "length=2.5"),
        ({"data": 5, "shuffle": 4}, "shuffle=4"),
        ({"data": 5, "seed": None}, "seed=None"),
        ({"data": 5, "uneven": "keep"}, "uneven='keep'.*pad, drop, exact"),
        ({"data": 5, "rank": 1}, "rank=1 and size=None"),
        ({"data": 5, "rank": 2, "size": 2}, "rank 2 of 2"),
        ({"data": 5, "rank": 0, "size": 2, "num_replicas": 3}, "size=2 and num_replicas=3"),
    ],
)
def test_arguments_that_make_no_sense_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        DistributedSampler(**arguments)


def test_pytorchs_name_for_the_world_size_is_understood() -> None:
    sampler = DistributedSampler(list("abcdef"), shuffle=False, num_replicas=3, rank=1)
    assert list(sampler) == [1, 4]


@pytest.mark.parametrize("workers", [0, 2])
def test_pytorchs_loader_takes_it_and_a_stop_in_mid_epoch_loses_nothing(workers: int) -> None:
    data = pytest.importorskip("torch.utils.data")

    def loaders(size: int) -> list[tuple[DistributedSampler, Any]]:
        samplers = _world(40, size, uneven="exact")
        options = {"batch_size": 4, "num_workers": workers, "persistent_workers": workers > 0}
        return [(s, data.DataLoader(range(40), sampler=s, **options)) for s in samplers]

    read, states = [], []
    for sampler, loader in loaders(2):
        batches = iter(loader)
        trained = [index for batch in itertools.islice(batches, 2) for index in batch.tolist()]
        states.append(sampler.state_dict(consumed=len(trained)))
        read += trained
        del batches
    assert states[0] == states[1]
    orders: list[int] = []
    for sampler, loader in loaders(3):
        sampler.load_state_dict(states[0])
        read += [index for batch in loader for index in batch.tolist()]
        orders += [index for batch in loader for index in batch.tolist()]
    assert sorted(read) == sorted(orders) == list(range(40))
