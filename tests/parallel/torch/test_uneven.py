"""Ranks with unequal numbers of batches end an epoch together, as one process would have it."""

import logging

import pytest
import torch

import hvdsync.torch as hvd
from hvdsync.errors import DataError, HvdsyncError
from tests.parallel.torch.helpers import assert_equal_on_all_ranks, plain_copy

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
pytestmark = pytest.mark.usefixtures("several_ranks")


def shares(steps=4, size=6):
    """The batches of each rank: rank r has ``steps + r``, and the last one of each is shorter."""
    generator = torch.Generator().manual_seed(3)
    everyone = []
    for rank in range(hvd.size()):
        sizes = [size] * (steps + rank - 1) + [size - 2 - rank % 2]
        rows = [torch.randn(n, 5, generator=generator) for n in sizes]
        everyone.append([(x, torch.tanh(x.sum(1, keepdim=True))) for x in rows])
    return everyone


def make_model():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)


def loss_of(model, x, y):
    return torch.nn.functional.mse_loss(model(x), y)


def train_alone(steps, clip=None):
    """One process, on the samples that all ranks together have in each step."""
    model = make_model()
    optimizer = make_optimizer(model)
    everyone = shares()
    for step in range(steps):
        present = [batches[step] for batches in everyone if step < len(batches)]
        x, y = (torch.cat(parts) for parts in zip(*present, strict=True))
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def assert_trained_like(model, expected):
    for found, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, other, **CLOSE)
    assert_equal_on_all_ranks(list(model.parameters()))


def distributed():
    model = make_model()
    return hvd.distribute(model, make_optimizer(model))


@pytest.mark.parametrize("policy", ["pad", "join"])
def test_every_batch_counts_once_as_in_one_process(policy, caplog):
    own = shares()[hvd.rank()]
    model, optimizer = distributed()
    batches = hvd.even_batches(own, policy, optimizer=optimizer)
    seen = []
    with caplog.at_level(logging.INFO, "hvdsync.data.uneven"):
        for x, y in batches:
            optimizer.zero_grad()
            (loss_of(model, x, y) * batches.scale).backward()
            optimizer.step()
            seen.append(x)
    most = 4 + hvd.size() - 1
    assert len(seen) == (most if policy == "pad" else len(own))
    assert all(a is b[0] for a, b in zip(seen, own, strict=False))
    assert_trained_like(model, train_alone(most))
    told = f"batches by rank: {', '.join(str(4 + r) for r in range(hvd.size()))}; policy '{policy}'"
    assert (told in caplog.text) == (hvd.rank() == 0)


def test_a_rank_that_takes_part_with_nothing_clips_and_schedules_like_the_others():
    own = shares()[hvd.rank()]
    model, optimizer = distributed()
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)

    def update():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        schedule.step()

    batches = hvd.even_batches(own, "join", optimizer=optimizer, update=update)
    for x, y in batches:
        optimizer.zero_grad()
        (loss_of(model, x, y) * batches.scale).backward()
        update()
    most = 4 + hvd.size() - 1
    assert schedule.last_epoch == most
    assert_trained_like(model, train_alone(most, clip=0.05))


@pytest.mark.parametrize("known", [True, False])
def test_min_ends_when_the_first_rank_has_no_more(known, caplog):
    own = shares()[hvd.rank()]
    model, optimizer = distributed()
    batches = own if known else (batch for batch in own)
    taken = 0
    with caplog.at_level(logging.INFO, "hvdsync.data.uneven"):
        for x, y in hvd.even_batches(batches):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            taken += 1
    assert hvd.allgather_object(taken) == [4] * hvd.size()
    assert_equal_on_all_ranks(list(model.parameters()))
    assert ("policy 'min': an epoch ends after 4" in caplog.text) == (hvd.rank() == 0)


def test_a_rank_without_any_batch_takes_part_or_is_refused_everywhere():
    own = shares()[hvd.rank()] if hvd.rank() else []
    model, optimizer = distributed()
    batches = hvd.even_batches(own, "join", optimizer=optimizer)
    for x, y in batches:
        optimizer.zero_grad()
        (loss_of(model, x, y) * batches.scale).backward()
        optimizer.step()
    assert_equal_on_all_ranks(list(model.parameters()))
    with pytest.raises(DataError, match=rf"rank {hvd.rank()}: .*rank 0 has no batch at all"):
        list(hvd.even_batches(own, "pad"))
    assert list(hvd.even_batches(own)) == []


def test_equal_shares_are_left_as_they_are(caplog):
    own = [torch.ones(3, 2)] * 3
    with caplog.at_level(logging.INFO, "hvdsync.data.uneven"):
        for policy in ("min", "pad"):
            batches = hvd.even_batches(own, policy)
            for _ in range(2):
                assert [(batch is own[0], batches.scale) for batch in batches] == [(True, 1.0)] * 3
    assert not caplog.text


def test_factors_follow_the_weight_that_batches_are_given():
    # Tokens: rank r has 2 + r of them in its one batch.
    mine, tokens = 2.0 + hvd.rank(), sum(2.0 + r for r in range(hvd.size()))
    batches = hvd.even_batches([["a"] * int(mine)], "pad", weight=len)
    assert [batches.scale for _ in batches] == [pytest.approx(mine * hvd.size() / tokens)]


def test_a_loop_that_forgets_the_factor_is_an_error_on_every_rank():
    own = [torch.ones(2, 1)] * (3 if hvd.rank() else 2)
    taken = 0
    with pytest.raises(HvdsyncError, match=r"in step 3 rank 0 did not use the factor"):
        for _ in hvd.even_batches(own, "pad"):
            taken += 1
    assert taken == 3


def test_a_batch_that_cannot_be_read_ends_all_ranks_and_is_named():
    last = hvd.size() - 1

    def read():
        yield torch.ones(1)
        if hvd.rank() == last:
            raise OSError("the disk is gone")
        yield torch.ones(1)

    expected = OSError if hvd.rank() == last else DataError
    with pytest.raises(expected, match="the disk is gone") as caught:
        list(hvd.even_batches(read()))
    if hvd.rank() != last:
        assert f"step 2: rank {last} could not read its batch" in str(caught.value)


def test_each_pass_asks_anew():
    lengths = {0: [2, 4], 1: [3, 3]}
    own = list(range(2))

    class Loader:
        def __len__(self):
            return len(own)

        def __iter__(self):
            return iter(own)

    batches = hvd.even_batches(Loader())
    taken = []
    for epoch in range(2):
        own[:] = range(lengths[min(hvd.rank(), 1)][epoch])
        taken.append(len(list(batches)))
    assert taken == [2, 3]


def test_accumulated_batches_are_weighted_one_by_one():
    own = shares()[hvd.rank()]
    plain = make_model()
    model, optimizer = hvd.distribute(plain, make_optimizer(plain), accumulate=2)
    batches = hvd.even_batches(own, "pad")
    for i, (x, y) in enumerate(batches):
        (loss_of(model, x, y) * batches.scale).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    alone = make_model()
    reference = make_optimizer(alone)
    everyone, most = shares(), 4 + hvd.size() - 1
    for first in range(0, most - most % 2, 2):
        for step in (first, first + 1):
            present = [b[step] for b in everyone if step < len(b)]
            x, y = (torch.cat(parts) for parts in zip(*present, strict=True))
            (loss_of(alone, x, y) / 2).backward()
        reference.step()
        reference.zero_grad()
    assert_trained_like(model, alone)


def test_join_is_refused_where_nothing_could_be_taken_part_in():
    model = make_model()
    with pytest.raises(ValueError, match="needs optimizer="):
        hvd.even_batches([], "join")
    with pytest.raises(ValueError, match="found a plain SGD"):
        hvd.even_batches([], "join", optimizer=make_optimizer(model))
    _, optimizer = hvd.distribute(plain_copy(model), make_optimizer(model), accumulate=3)
    with pytest.raises(ValueError, match="found 3 backward passes per step"):
        hvd.even_batches([], "join", optimizer=optimizer)
    with pytest.raises(ValueError, match="'min', 'pad', 'join'"):
        hvd.even_batches([], "stop")
