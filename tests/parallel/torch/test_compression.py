"""Compressed gradients between real ranks: what travels, what arrives, what is remembered."""

import math
import time

import numpy as np
import pytest
import torch
from torch import nn

import hvdsync.torch as hvd
from hvdsync import errors as hvd_errors
from tests.parallel.ranks import shard
from tests.parallel.torch.helpers import assert_equal_on_all_ranks, plain_copy
from tests.parallel.wire_bytes import TORCH_FLAGS, sent_bytes

ALL = [
    "none",
    "fp16",
    "bf16",
    "onebit",
    "topk:0.05",
    "topk:0.05,0.9",
    "powersgd:2",
    "powersgd:2,3",
]
LOSSY = ALL[3:]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 3))


def batches(steps):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(8, 40, generator=generator),
            torch.randn(8, 3, generator=generator),
        )
        for _ in range(steps)
    ]


def train(model, optimizer, steps, part=shard):
    for x, y in batches(steps):
        x, y = part(x, y)
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()


def distributed(name, lr=0.1, **options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    return hvd.distribute(model, optimizer, compression=hvd.Compression.named(name), **options)


@pytest.mark.usefixtures("several_ranks")
@pytest.mark.parametrize("name", ALL)
def test_bytes_on_the_wire_are_those_of_the_formula(name):
    model, optimizer = distributed(name)
    train(model, optimizer, 5)
    assert optimizer.sent_bytes == sent_bytes(name, hvd.size(), 5, TORCH_FLAGS)


@pytest.mark.parametrize("name", ALL)
def test_ranks_stay_equal_and_the_loss_falls(name):
    model, optimizer = distributed(name, lr=0.02)

    def loss():
        with torch.no_grad():
            return sum(float(((model(x) - y) ** 2).mean()) for x, y in batches(4))

    before = loss()
    for _ in range(8):
        train(model, optimizer, 4)
    assert_equal_on_all_ranks(model.parameters())
    assert loss() < 0.9 * before


@pytest.mark.usefixtures("several_ranks")
def test_a_second_collective_starts_once_the_first_is_over_and_nothing_waits_for_that():
    model, optimizer = distributed("bf16")
    train(model, optimizer, 1)
    wire = optimizer._reducer.wire
    flat = torch.full((6,), hvd.rank() + 1.0)
    flight = wire.send(flat, "early") if hvd.rank() == 0 else None
    if flight:
        wire.go_on([flight])
        assert flight.kind == "alltoall"
    hvd.barrier()  # the others come when rank 0 has looked
    flight = flight or wire.send(flat, "early")
    while not hvd.poll(flight.handle):
        time.sleep(0.01)
    wire.go_on([flight])
    assert flight.kind == "gather" and not flight.is_over
    wire.receive(flat, flight)
    assert flat.tolist() == [(hvd.size() + 1) / 2] * 6


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_the_bits_give_nearly_the_weights_of_one_process(name):
    model, optimizer = distributed(name)
    reference = plain_copy(model)
    train(model, optimizer, 5)
    plain = torch.optim.SGD(reference.parameters(), 0.1)
    train(reference, plain, 5, part=lambda *batch: batch)
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)


@pytest.mark.usefixtures("several_ranks")
@pytest.mark.parametrize("name", ["onebit", "topk:0.05", "powersgd:2"])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
def test_what_arrived_and_what_is_kept_are_all_gradients(name, op):
    model, optimizer = distributed(name, lr=1.0, op=op)
    start = [p.detach().clone() for p in model.parameters()]
    wanted = [torch.zeros_like(p) for p in start]
    for x, y in batches(4):
        twin = plain_copy(model)
        x, y = shard(x, y)
        ((twin(x) - y) ** 2).mean().backward()
        for total, p in zip(wanted, twin.parameters(), strict=True):
            total += hvd.allreduce(p.grad, op=op)
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    moved = [a - b.detach() for a, b in zip(start, model.parameters(), strict=True)]
    kept = optimizer._reducer.wire.memory.recall(
        optimizer._reducer._buckets[0].parts, torch.zeros(0)
    )
    # Buckets hold the last tensor first.
    for total, found, state in zip(wanted, moved, reversed(kept), strict=True):
        if state:
            found = found + hvd.allreduce(state["error"].reshape(found.shape), op=op)
        # Sums over ranks move weights far, and differences of them are rounded as they are.
        torch.testing.assert_close(found, total, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", LOSSY)
def test_tensors_that_no_rank_used_forget_nothing(name):
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = hvd.distribute(model, optimizer, compression=hvd.Compression.named(name))
    for _ in range(4):
        optimizer.zero_grad()
        (model[0](torch.randn(3, 40)).sum() + model[1](torch.randn(3, 40)).sum()).backward()
        optimizer.step()
    before = model[1].weight.detach().clone()
    optimizer.zero_grad()
    model[0](torch.randn(3, 40)).sum().backward()
    assert model[1].weight.grad is None
    optimizer.step()
    assert torch.equal(model[1].weight, before)
    if hvd.size() > 1:
        wire = optimizer._reducer.wire
        (state,) = (s for n, s in wire.memory._states.items() if n == "1.weight")
        assert float(state["error"].abs().max()) > 0


@pytest.mark.usefixtures("several_ranks")
@pytest.mark.parametrize("name", LOSSY[:4])
def test_a_step_that_a_guard_skips_is_not_remembered(name):
    guard = hvd.Guard(on_nonfinite="skip")
    model, optimizer = distributed(name, guard=guard)
    train(model, optimizer, 3)
    memory = optimizer._reducer.wire.memory
    before = {n: {k: v.clone() for k, v in s.items()} for n, s in memory._states.items()}
    weights = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    x, y = batches(1)[0]
    scale = math.nan if hvd.rank() == hvd.size() - 1 else 1.0
    (((model(x) - y) * scale) ** 2).mean().backward()
    optimizer.step()
    for p, weight in zip(model.parameters(), weights, strict=True):
        assert torch.equal(p, weight)
    for parameter, state in before.items():
        for key, value in state.items():
            assert torch.equal(memory._states[parameter][key], value)
    train(model, optimizer, 1)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.usefixtures("several_ranks")
def test_numbers_whose_sum_overflows_half_precision_arrive():
    model = nn.Linear(4, 1, bias=False)
    model, _ = hvd.distribute(
        model, torch.optim.SGD(model.parameters(), 1.0), compression=hvd.Compression.fp16
    )
    model.weight.grad = None
    model(torch.full((1, 4), 6e4)).sum().backward()
    np.testing.assert_array_equal(model.weight.grad.numpy(), np.full((1, 4), 6e4))


def test_channels_last_convolutions_are_compressed():
    torch.manual_seed(0)
    model = nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)
    model, _ = hvd.distribute(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        compression=hvd.Compression.powersgd(2),  # no loss: the gradient of a sum has rank 1
    )
    x = torch.randn(2, 16, 6, 6, generator=torch.Generator().manual_seed(hvd.rank()))
    twin = plain_copy(model)
    twin(x).sum().backward()
    model(x).sum().backward()
    expected = hvd.allreduce(twin.weight.grad.contiguous())
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-4, atol=1e-4)


def test_several_passes_per_step_send_once():
    model, optimizer = distributed("topk:0.05", accumulate=2)
    x, y = batches(1)[0]
    for _ in range(2):
        ((model(x) - y) ** 2).mean().backward()
    optimizer.step()
    if hvd.size() > 1:
        assert optimizer.sent_bytes == sent_bytes("topk:0.05", hvd.size(), flags=TORCH_FLAGS)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compression": hvd.Compression.onebit, "op": hvd.Adasum}, "weighs each rank's whole"),
        ({"compression": hvd.Compression.bf16, "op": hvd.Adasum}, "weighs each rank's whole"),
        ({"compression": hvd.Compression.topk(0.01, momentum=0.9)}, "it would count twice"),
    ],
)
def test_combinations_without_sense_are_refused(options, reason):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with pytest.raises(ValueError, match=reason):
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def test_a_single_collective_refuses_what_remembers():
    with pytest.raises(ValueError, match="give it to DistributedOptimizer or distribute"):
        hvd.allreduce(torch.ones(3), compression=hvd.Compression.onebit)


@pytest.mark.parametrize("name", ["onebit", "topk:0.05,0.9", "powersgd:2,4"])
def test_a_run_from_a_checkpoint_comes_to_the_bits_of_one_that_did_not_stop(name, shared_path):
    def save(model, optimizer, step):
        with hvd.Checkpoint(shared_path) as checkpoint:
            feedback = hvd.ErrorFeedback(optimizer)
            checkpoint.save(step, model=model, optimizer=optimizer, feedback=feedback)

    model, optimizer = distributed(name)
    train(model, optimizer, 3)
    save(model, optimizer, 3)
    train(model, optimizer, 3)
    expected = [p.detach().clone() for p in model.parameters()]
    # One that has met its tensors, and one that has not.
    for steps_before in (2, 0):
        model, optimizer = distributed(name)
        train(model, optimizer, steps_before)
        with hvd.Checkpoint(shared_path) as checkpoint:
            feedback = hvd.ErrorFeedback(optimizer)
            checkpoint.restore(model=model, optimizer=optimizer, feedback=feedback)
        train(model, optimizer, 3)
        for found, wanted in zip(model.parameters(), expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.usefixtures("several_ranks")
def test_what_another_compressor_remembered_is_refused():
    saved = hvd.ErrorFeedback(distributed("onebit")[1]).state_dict()
    with pytest.raises(
        hvd_errors.CheckpointError, match=r"of compression OneBit\(\), expected Top"
    ):
        hvd.ErrorFeedback(distributed("topk:0.1")[1]).load_state_dict(saved)
