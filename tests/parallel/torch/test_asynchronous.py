"""``update=Asynchronous()``: what each rank's optimizer does counts in full, at its own pace.

Gradients do not depend on the weights here, so that what steps come to is known in any order.
"""

import copy

import numpy as np
import pytest
import torch

import hvdsync.torch as hvd
from hvdsync.errors import HvdsyncError, LaunchError
from tests.parallel.ranks import wait_until
from tests.parallel.torch.helpers import assert_equal_on_all_ranks

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.25),
}


class Net(torch.nn.Module):
    """Its gradients are what it is called with; two dtypes, and buffers."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
        self.bias = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        return (self.weight * x).sum() + (self.bias * x[:, 0]).sum()


def gradient(rank, step):
    return torch.from_numpy(
        np.random.default_rng((rank, step)).integers(-4, 5, (2, 3)).astype(np.float32)
    )


def train(model, optimizer, rank, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(gradient(rank, step)).backward()
        optimizer.step()


def distributed(make=OPTIMIZERS["sgd"], model=None, **options):
    model = Net() if model is None else model
    update = options.pop("update", hvd.Asynchronous())
    return hvd.distribute(model, make(model.parameters()), update=update, **options)


def moves(make, steps_of):
    """How far one process's parameters come by all the steps, each rank's optimizer its own."""
    total = [torch.zeros_like(p) for p in Net().parameters()]
    for rank, steps in steps_of.items():
        model = Net()
        train(model, make(model.parameters()), rank, steps)
        for moved, after, before in zip(total, model.parameters(), Net().parameters(), strict=True):
            moved += after.detach() - before.detach()
    return total


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_model_moves_by_the_sum_of_what_every_ranks_own_optimizer_did(mpi, name):
    model, optimizer = distributed(OPTIMIZERS[name])
    assert optimizer.replicas_equal
    steps_of = {rank: 5 + 3 * rank for rank in range(hvd.size())}
    train(model, optimizer, hvd.rank(), steps_of[hvd.rank()])
    assert not optimizer.replicas_equal
    with pytest.raises(HvdsyncError, match="not meant to be equal"):
        hvd.check_replicas(model, optimizer)
    optimizer.synchronize_replicas()
    assert optimizer.replicas_equal
    hvd.check_replicas(model, optimizer)
    expected = moves(OPTIMIZERS[name], steps_of)
    for found, before, moved in zip(model.parameters(), Net().parameters(), expected, strict=True):
        torch.testing.assert_close(found.detach(), before.detach() + moved, rtol=0, atol=1e-4)


def test_a_rank_trains_on_while_another_takes_no_step(mpi):
    model, optimizer = distributed()
    # The first step is made by all: parameters are shared from then on.
    train(model, optimizer, hvd.rank(), 1)
    shared = optimizer._local.shared
    if hvd.rank() == 0:
        wait_until(lambda: all(shared._counters.read(r, 0) >= 30 for r in shared._others))
    else:
        train(model, optimizer, hvd.rank(), 29, first=1)
    # Then it goes on with what the others have come to, and not with what it had.
    train(model, optimizer, hvd.rank(), 1, first=50)
    optimizer.synchronize_replicas()
    assert_equal_on_all_ranks(model.parameters())


def test_passes_of_a_step_are_averaged_on_the_rank(mpi):
    model, optimizer = distributed(accumulate=2)
    optimizer.zero_grad()
    for x in (1.0, 3.0):
        model(torch.full((2, 3), x)).backward()
    optimizer.step()
    optimizer.synchronize_replicas()
    torch.testing.assert_close(model.weight.detach(), Net().weight - 0.5 * 2 * hvd.size())


def test_buffers_meet_with_the_replicas(mpi):
    model, optimizer = distributed()
    train(model, optimizer, hvd.rank(), 1)
    model.mean.fill_(hvd.rank())
    model.count.fill_(5 + hvd.rank())
    optimizer.synchronize_replicas()
    torch.testing.assert_close(model.mean, torch.full((3,), (hvd.size() - 1) / 2))
    assert model.count == 5


def test_a_rank_leaves_out_its_own_steps_that_are_not_finite(mpi):
    guard = hvd.Guard(on_nonfinite="skip")
    model, optimizer = distributed(guard=guard)
    train(model, optimizer, 0, 1)
    if hvd.rank() == 1:
        optimizer.zero_grad()
        model(torch.full((2, 3), float("nan"))).backward()
        optimizer.step()
    assert guard.skipped == (hvd.rank() == 1)
    optimizer.synchronize_replicas()
    expected = Net().weight - 0.5 * hvd.size() * gradient(0, 0)
    torch.testing.assert_close(model.weight.detach(), expected.detach())


def test_halves_are_shared_in_single_precision(mpi):
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    model, optimizer = distributed(model=model)
    # Too little for a half each: 1 - 2**-10 rounds to 1.
    model.weight.grad = torch.full_like(model.weight, 2.0**-9)
    optimizer.step()
    optimizer.synchronize_replicas()
    assert model.weight.dtype == torch.bfloat16
    for values in optimizer._local.shared.values:
        assert values.dtype == np.float32


def test_parameters_that_are_added_are_shared_from_the_next_step_on(mpi):
    model, optimizer = distributed()
    train(model, optimizer, hvd.rank(), 2 + hvd.rank())
    extra = torch.nn.Parameter(torch.zeros(4))
    optimizer.add_param_group({"params": [extra]})
    optimizer.zero_grad()
    extra.grad = torch.ones(4)
    optimizer.step()
    optimizer.synchronize_replicas()
    torch.testing.assert_close(extra.detach(), torch.full((4,), -0.5 * hvd.size()))
    steps_of = {rank: 2 + rank for rank in range(hvd.size())}
    moved = moves(OPTIMIZERS["sgd"], steps_of)[0]
    torch.testing.assert_close(model.weight.detach(), (Net().weight + moved).detach())


def test_a_checkpoint_is_of_one_model_and_training_goes_on_from_it(mpi, shared_path):
    make = OPTIMIZERS["adam"]
    model, optimizer = distributed(make)
    train(model, optimizer, hvd.rank(), 3 + hvd.rank())
    checkpoint = hvd.Checkpoint(shared_path)
    checkpoint.save(1, model=model, optimizer=optimizer)
    assert_equal_on_all_ranks(model.parameters())
    saved = copy.deepcopy(model.state_dict())
    train(model, optimizer, hvd.rank(), 2)
    checkpoint.restore(model=model, optimizer=optimizer)
    optimizer.synchronize_replicas()
    torch.testing.assert_close(model.state_dict(), saved, rtol=0, atol=0)
    # The same step on every rank, and on one process that goes on from the same files.
    alone = Net()
    plain = make(alone.parameters())
    checkpoint.restore(model=alone, optimizer=plain)
    train(alone, plain, 0, 1, first=9)
    train(model, optimizer, 0, 1, first=9)
    optimizer.synchronize_replicas()
    for found, after, name in zip(model.parameters(), alone.parameters(), saved, strict=False):
        expected = saved[name] + hvd.size() * (after.detach() - saved[name])
        torch.testing.assert_close(found.detach(), expected, rtol=0, atol=1e-5)


def test_with_one_rank_it_is_the_plain_optimizer_bit_for_bit():
    if hvd.size() > 1:
        pytest.skip("of one rank")
    model, optimizer = distributed(OPTIMIZERS["adam"])
    plain = Net()
    train(model, optimizer, 0, 5)
    train(plain, OPTIMIZERS["adam"](plain.parameters()), 0, 5)
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_ranks_over_gloo_are_told_how_to_start(gloo):
    with pytest.raises(LaunchError, match=f"horovodrun over Gloo.*--mpi -np {hvd.size()}"):
        distributed()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compression": hvd.Compression.fp16}, "nothing of it may be lost"),
        ({"op": hvd.Sum}, "not reduced at all"),
        ({"process_set": hvd.ProcessSet([0])}, "global one"),
    ],
)
def test_combinations_without_sense_are_refused_with_the_reason(options, reason):
    with pytest.raises(ValueError, match=reason):
        distributed(**options)


def test_an_impossible_bound_is_refused():
    with pytest.raises(ValueError, match="staleness is -1; expected None, or 0 or more"):
        hvd.Asynchronous(staleness=-1)


def test_the_bound_reaches_the_shared_parameters(mpi):
    model, optimizer = distributed(update=hvd.Asynchronous(staleness=2))
    train(model, optimizer, hvd.rank(), 1)
    shared = optimizer._local.shared
    if hvd.rank() == 0:
        # The others go two steps further than this one, and there they wait.
        wait_until(lambda: all(shared._counters.read(r, 0) == 4 for r in shared._others))
    train(model, optimizer, hvd.rank(), 5, first=1)
    for rank in shared._others:
        assert shared._counters.read(rank, 0) >= 4
    optimizer.synchronize_replicas()
