"""Elastic state on a fixed set of ranks: commit, restore and sync."""

import copy

import torch
from torch import nn

import hvdsync.torch as hvd
from tests.parallel.torch.helpers import assert_equal_on_all_ranks


def train_once(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def make():
    torch.manual_seed(hvd.rank())
    model = nn.Linear(2, 1)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def test_restore_goes_back_to_the_last_commit():
    model, optimizer = make()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)
    train_once(model, optimizer)
    state.epoch = 1
    state.commit()
    committed = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train_once(model, optimizer)
    state.epoch = 2
    state.restore()
    assert state.epoch == 1
    assert all(torch.equal(committed[0][k], v) for k, v in model.state_dict().items())
    for k, s in optimizer.state_dict()["state"].items():
        assert all(torch.equal(committed[1]["state"][k][name], value) for name, value in s.items())
    train_once(model, optimizer)
    state.restore()  # a second time: the commit itself was not trained on
    assert all(torch.equal(committed[0][k], v) for k, v in model.state_dict().items())


def test_sync_gives_all_ranks_the_state_of_rank_zero_without_a_hidden_step():
    model, optimizer = make()
    if hvd.rank() == 0:
        for group in optimizer.param_groups:
            group["lr"] = 0.5
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    scheduler.last_epoch = 7 + hvd.rank()
    before = copy.deepcopy(model.state_dict())
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, scheduler=scheduler, batch=hvd.rank()
    )
    state.sync()
    assert (state.batch, scheduler.last_epoch, optimizer.param_groups[0]["lr"]) == (0, 7, 0.5)
    assert optimizer.state_dict()["state"] == {}
    assert_equal_on_all_ranks(model.state_dict().values())
    if hvd.rank() == 0:
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_an_assigned_model_is_the_one_that_is_kept():
    model, optimizer = make()
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)
    other, _ = make()
    nn.init.constant_(other.weight, 3.0)
    state.model = other
    state.commit()
    nn.init.constant_(other.weight, 4.0)
    state.restore()
    assert other.weight.tolist() == [[3.0, 3.0]]
