"""Broadcast of model and optimizer state, and checkpoints of them."""

import copy
import hashlib

import pytest
import torch
from torch import nn

import hvdsync.torch as hvd
from hvdsync.errors import CheckpointError
from tests.parallel.torch.helpers import assert_equal_on_all_ranks


def differently_initialised(*, frozen=False):
    torch.manual_seed(100 + hvd.rank())
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].requires_grad_(not frozen)
    return model


def one_step(model, optimizer):
    optimizer.zero_grad()
    torch.manual_seed(7)
    model(torch.randn(6, 3)).pow(2).mean().backward()
    optimizer.step()


def test_distribute_gives_all_ranks_the_model_of_rank_zero():
    model = differently_initialised()
    before = copy.deepcopy(model.state_dict())
    model, _ = hvd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert_equal_on_all_ranks(model.state_dict().values())
    if hvd.rank() == 0:
        assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_broadcasting_a_fresh_optimizer_takes_no_hidden_step(make):
    """A zero-gradient step would move AdamW's weights and shrink Adam's first update."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = make(model.parameters(), lr=0.1, weight_decay=0.1)
    model, optimizer = hvd.distribute(model, optimizer)
    assert model.weight.item() == 1.0
    assert optimizer.state_dict()["state"] == {}
    assert model.weight.grad is None
    plain_model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(plain_model.weight)
    plain = make(plain_model.parameters(), lr=0.1, weight_decay=0.1)
    for m, o in ((model, optimizer), (plain_model, plain)):
        m(torch.ones(1, 1)).sum().backward()
        o.step()
    assert model.weight.item() == plain_model.weight.item()


def test_state_loaded_on_rank_zero_alone_reaches_all():
    model = differently_initialised()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.999))
    if hvd.rank() == 0:
        one_step(model, optimizer)
        for group in optimizer.param_groups:
            group.update(lr=1e-3, betas=(0.5, 0.6))
    model, optimizer = hvd.distribute(model, optimizer)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 1e-3
    assert state["param_groups"][0]["betas"] == (0.5, 0.6)
    assert [s["step"].item() for s in state["state"].values()] == [1.0] * 6
    assert_equal_on_all_ranks([s[k] for s in state["state"].values() for k in sorted(s)])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_frozen_layers_and_stateless_optimizers_are_broadcast(momentum):
    model = differently_initialised(frozen=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    if hvd.rank() == 0:
        one_step(model, optimizer)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert_equal_on_all_ranks(model.state_dict().values())
    buffers = [s["momentum_buffer"] for s in optimizer.state_dict()["state"].values() if s]
    assert_equal_on_all_ranks([b for b in buffers if b is not None])


def test_wrapped_and_plain_state_dicts_are_interchangeable():
    model = differently_initialised()
    model, optimizer = hvd.distribute(model, torch.optim.Adam(model.parameters(), lr=0.1))
    one_step(model, optimizer)
    plain = torch.optim.Adam(copy.deepcopy(model).parameters(), lr=0.5)
    plain.load_state_dict(optimizer.state_dict())
    assert plain.param_groups[0]["lr"] == 0.1
    optimizer.load_state_dict(plain.state_dict())
    assert_equal_on_all_ranks(model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_any_dtype_and_layout_are_broadcast(dtype):
    value = (torch.arange(12).reshape(3, 4) % 2 + hvd.rank()).to(dtype)
    scalar = torch.tensor(hvd.rank()).to(dtype)
    transposed = value.clone().t()
    expected = (torch.arange(12).reshape(3, 4) % 2).to(dtype)
    hvd.broadcast_parameters([value, scalar, transposed], root_rank=0)
    assert torch.equal(value, expected)
    assert torch.equal(transposed, expected.t())
    assert scalar == torch.tensor(0).to(dtype)


def test_broadcast_from_another_rank():
    root = hvd.size() - 1
    tensor = torch.full((5,), float(hvd.rank()))
    hvd.broadcast_parameters({"t": tensor}, root_rank=root)
    assert tensor.tolist() == [float(root)] * 5


def test_checkpoint_is_written_by_rank_zero_and_restored_on_all(shared_path):
    model = differently_initialised()
    model, optimizer = hvd.distribute(model, torch.optim.Adam(model.parameters(), lr=0.1))
    one_step(model, optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    folder = hvd.Checkpoint(shared_path).save(3, model=model, optimizer=optimizer, epoch=2)
    assert folder == shared_path / "step-00000003"

    one_step(model, optimizer)
    restored = hvd.Checkpoint(shared_path).restore(model=model, optimizer=optimizer)
    assert (restored["step"], restored["epoch"]) == (3, 2)
    for key, value in model.state_dict().items():
        assert torch.equal(value, saved[0][key])
    for key, state in optimizer.state_dict()["state"].items():
        assert all(
            torch.equal(value, saved[1]["state"][key][name]) for name, value in state.items()
        )

    plain = torch.load(folder / "model.pt", weights_only=True)
    assert plain.keys() == saved[0].keys()
    digest = hashlib.sha256((folder / "model.pt").read_bytes()).hexdigest()
    assert digest in (folder / "manifest.json").read_text()


def test_a_save_that_fails_on_rank_zero_raises_on_all_ranks(shared_path):
    checkpoint = hvd.Checkpoint(shared_path / "sub")
    checkpoint.save(1, epoch=1)
    if hvd.rank() == 0:
        (shared_path / "sub" / ".unfinished-step-00000002").write_text(
            "a file where a folder must be"
        )
    with pytest.raises(CheckpointError, match="step 2"):
        checkpoint.save(2, epoch=2)
    assert checkpoint.latest() == 1
    with pytest.raises(CheckpointError, match="model"):
        checkpoint.save(3, model=object())
    assert checkpoint.restore()["epoch"] == 1


def test_nothing_to_restore_is_none_everywhere(shared_path):
    checkpoint = hvd.Checkpoint(shared_path)
    assert checkpoint.restore(model=differently_initialised()) is None
    assert checkpoint.latest() is None


def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(shared_path):
    hvd.Checkpoint(shared_path).save(1, model=nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"model.*weight: found \(2, 2\), expected \(2, 3\)"):
        hvd.Checkpoint(shared_path).restore(model=nn.Linear(3, 2))
    with pytest.raises(CheckpointError, match="not optimizer"):
        hvd.Checkpoint(shared_path).restore(
            optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        )
