"""Gradients of ranks on one host, through the memory that they have in common."""

import pytest
import torch
from torch import nn

import hvdsync.torch as hvd
from hvdsync.comm.host_memory import SWITCH

# More than what is always added up by every rank on its own, with any number of ranks.
INPUTS, UNITS = 300, 30


@pytest.fixture
def trained():
    """A net and its optimizer, which has taken one step, and a function that takes one more."""
    torch.manual_seed(0)
    model = nn.Linear(INPUTS, UNITS)
    model, optimizer = hvd.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def step(factor):
        optimizer.zero_grad()
        (factor * model(torch.ones(1, INPUTS)).sum()).backward()
        gradient = model.weight.grad.clone()
        optimizer.step()
        return gradient

    step(1.0)
    return optimizer, step


def is_shared(optimizer):
    return [bucket.shared is not None for bucket in optimizer._reducer._buckets]


def test_from_the_second_step_on_ranks_of_one_host_use_it(several_ranks, trained):
    optimizer, step = trained
    assert is_shared(optimizer) == [True]
    mean_of_ranks = (hvd.size() + 1) / 2
    for turn in range(1, 4):
        gradient = step(turn * (hvd.rank() + 1.0))
        torch.testing.assert_close(gradient, torch.full((UNITS, INPUTS), turn * mean_of_ranks))


def test_bytes_and_collectives_are_counted_as_before(several_ranks, trained):
    optimizer, step = trained
    before = optimizer.sent_bytes, optimizer.collectives
    step(1.0)
    flags = 2 * 2 + 2
    assert optimizer.sent_bytes - before[0] == 4 * (INPUTS * UNITS + UNITS + flags)
    assert optimizer.collectives - before[1] == 1


def test_joined_ranks_count_as_zeros(several_ranks, trained):
    _, step = trained
    for turn in range(hvd.rank() + 1):
        gradient = step(1.0)
        takes_part = hvd.size() - turn
        torch.testing.assert_close(gradient, torch.full((UNITS, INPUTS), takes_part / hvd.size()))
    hvd.join()
    # Afterwards all are at the same turn.
    torch.testing.assert_close(step(1.0), torch.ones(UNITS, INPUTS))


def test_one_rank_that_does_not_want_it_is_enough(several_ranks, monkeypatch):
    if hvd.rank() == hvd.size() - 1:
        monkeypatch.setenv(SWITCH, "0")
    model = nn.Linear(2, 1)
    model, optimizer = hvd.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2) * (hvd.rank() + 1)).sum().backward()
        assert model.weight.grad.tolist() == [[(hvd.size() + 1) / 2] * 2]
        optimizer.step()
    assert is_shared(optimizer) == [False]
