"""Replicas that differ in one bit are found, named and mended; equal ones pass (2 and 4 ranks)."""

import logging

import pytest
import torch

import hvdsync.torch as hvd
from hvdsync.errors import HvdsyncError, RankMismatch, ReplicaMismatch
from tests.parallel.torch.helpers import assert_equal_on_all_ranks

pytestmark = pytest.mark.usefixtures("several_ranks")


def make_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1)
    )


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
}


def train(optimizer="adam", steps=2):
    """Equal replicas that have taken steps: every rank sees the same data."""
    model, optimizer = hvd.distribute(
        model := make_model(), OPTIMIZERS[optimizer](model.parameters())
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 5)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def flip(tensor, rank=None):
    """The lowest mantissa bit of the last element, on one rank (the last) only."""
    if hvd.rank() == (hvd.size() - 1 if rank is None else rank):
        kind = {4: torch.int32, 8: torch.int64, 2: torch.int16}[tensor.element_size()]
        tensor.detach().reshape(-1).view(kind)[-1] ^= 1


def mismatch_of(*arguments, **options):
    """What is said, once all ranks have said it; only its first words are each rank's own."""
    with pytest.raises(ReplicaMismatch) as error:
        hvd.check_replicas(*arguments, **options)
    text = str(error.value)
    assert text.startswith(f"rank {hvd.rank()} of {hvd.size()}: ")
    told = hvd.allgather_object(text.partition(": ")[2])
    assert len(set(told)) == 1
    return text


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equal_replicas_pass_fresh_and_trained(optimizer):
    hvd.check_replicas(*train(optimizer, steps=0))
    model, optimizer = train(optimizer)
    hvd.check_replicas(model, optimizer)
    hvd.check_replicas(model)


def test_one_flipped_bit_of_a_parameter_is_found_and_measured():
    model, optimizer = train()
    before = model[0].weight.detach()[-1, -1].item()
    flip(model[0].weight)
    step = abs(model[0].weight.detach()[-1, -1].item() - before)
    step = max(hvd.allgather_object(step))
    text = mismatch_of(model, optimizer)
    assert "'0.weight' (float32 (7, 5))" in text
    last = hvd.size() - 1
    assert f"rank {last} differs from" in text
    assert f"rank {last} in 1 of 35 elements, by at most {step:.6g}" in text
    assert "in all" not in text


@pytest.mark.parametrize("buffer", ["running_mean", "running_var", "num_batches_tracked"])
def test_one_flipped_bit_of_a_buffer_is_found(buffer):
    model, optimizer = train()
    flip(getattr(model[1], buffer))
    text = mismatch_of(model, optimizer)
    assert f"'1.{buffer}'" in text
    assert ("synchronised layer" in text) == buffer.startswith("running_")


@pytest.mark.parametrize(
    ("optimizer", "slot"),
    [("sgd", "momentum_buffer"), ("adam", "exp_avg"), ("adam", "exp_avg_sq"), ("adam", "step")],
)
def test_one_flipped_bit_of_optimizer_state_is_found(optimizer, slot):
    model, optimizer = train(optimizer)
    flip(optimizer.state[model[2].weight][slot])
    assert f"'optimizer.state.2.weight.{slot}'" in mismatch_of(model, optimizer)
    hvd.check_replicas(model)


def test_a_learning_rate_of_one_rank_is_found():
    model, optimizer = train()
    if hvd.rank() == 0:
        optimizer.param_groups[0]["lr"] = 0.02
    text = mismatch_of(model, optimizer)
    assert "'optimizer.param_groups.0.lr'" in text
    assert "0.02" in text and "0.01" in text


def test_the_scale_of_a_scaler_is_compared():
    model, optimizer = train()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + (hvd.rank() == 0)))
    assert "'scaler.scale'" in mismatch_of(model, optimizer, scaler=scaler)


def test_a_single_rank_against_three_is_named_with_the_first_of_several_tensors():
    if hvd.size() < 4:
        pytest.skip("a majority takes more ranks")
    model, optimizer = train()
    flip(model[2].weight, rank=0)
    flip(optimizer.state[model[0].weight]["exp_avg"], rank=0)
    text = mismatch_of(model, optimizer)
    assert "'2.weight'" in text
    assert "rank 0 differs from the majority (ranks 1, 2, 3)" in text
    assert "(2 of " in text
    guard = hvd.Guard(every=1, on_divergence="repair")
    expected = hvd.broadcast_object(model[2].weight.detach().clone(), 1)
    assert guard.check(model, optimizer)
    assert torch.equal(model[2].weight, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_compared_bit_for_bit(dtype):
    model = make_model().to(dtype)
    hvd.broadcast_parameters(model.state_dict())
    hvd.check_replicas(model)
    flip(model[0].bias)
    text = mismatch_of(model)
    assert "'0.bias'" in text and "in 1 of 7 elements, by at most" in text


def test_a_sign_of_zero_is_a_difference_of_bits():
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(-0.0 if hvd.rank() == 0 else 0.0)
        model.bias.fill_(1.0)
    assert "in bits of equal numbers" in mismatch_of(model)


def test_names_that_are_ignored_may_differ():
    model, optimizer = train()
    flip(model[1].running_mean)
    hvd.check_replicas(model, optimizer, ignore=["*.running_*"])
    guard = hvd.Guard(every=1, ignore=["*.running_*"])
    assert not guard.check(model, optimizer)


def test_a_shape_of_one_rank_is_named_and_not_repaired():
    model = torch.nn.Linear(3 + (hvd.rank() == 0), 1)
    text = mismatch_of(model)
    assert "in kind in 'weight'" in text
    assert "rank 0: float32 (1, 4)" in text and "rank 1: float32 (1, 3)" in text
    with pytest.raises(RankMismatch, match="the variables differ"):
        hvd.Guard(every=1, on_divergence="repair").check(model)


def test_state_that_one_rank_lacks_is_named_and_repaired():
    model, optimizer = train()
    if hvd.rank() == hvd.size() - 1:
        optimizer.state.clear()
    text = mismatch_of(model, optimizer)
    assert "'optimizer.state.0.weight.step'" in text
    assert f"rank {hvd.size() - 1}: none" in text
    hvd.Guard(every=1, on_divergence="repair").check(model, optimizer)
    hvd.check_replicas(model, optimizer)


def test_a_rank_that_cannot_read_its_state_fails_all():
    class Unreadable(torch.nn.Linear):
        def state_dict(self, *args, **kwargs):
            raise OSError("no state here")

    model = Unreadable(2, 2) if hvd.rank() == 0 else torch.nn.Linear(2, 2)
    expected = OSError if hvd.rank() == 0 else HvdsyncError
    with pytest.raises(expected, match="no state here"):
        hvd.check_replicas(model)


def test_a_guard_looks_at_every_so_many_steps():
    model, optimizer = train()
    flip(model[0].weight)
    guard = hvd.Guard(every=3)
    for _ in range(2):
        assert not guard.check(model, optimizer)
    with pytest.raises(ReplicaMismatch, match=r"0\.weight"):
        guard.check(model, optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_repair_makes_replicas_equal_and_says_so_on_rank_zero(optimizer, caplog):
    model, optimizer = train(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + hvd.rank()))
    expected = hvd.broadcast_object(model[0].weight.detach().clone())
    flip(model[0].weight)
    flip(model[1].running_var)
    for state in optimizer.state.values():
        for value in state.values():
            flip(value)
    if hvd.rank() == hvd.size() - 1:
        optimizer.param_groups[0]["lr"] = 0.5
    guard = hvd.Guard(every=1, on_divergence="repair")
    with caplog.at_level(logging.WARNING, logger="hvdsync"):
        assert guard.check(model, optimizer, scaler=scaler)
    warnings = [r.getMessage() for r in caplog.records if r.name.startswith("hvdsync.guard")]
    if hvd.rank() == 0:
        assert len(warnings) == 1
        assert "step 1" in warnings[0] and "'0.weight'" in warnings[0]
        assert f"rank {hvd.size() - 1} differs" in warnings[0]
        assert "state of rank 0" in warnings[0]
    else:
        assert warnings == []
    assert torch.equal(model[0].weight, expected)
    assert scaler.get_scale() == 2.0**10
    assert_equal_on_all_ranks(
        [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
    )
    hvd.check_replicas(model, optimizer, scaler=scaler)
    assert guard.repairs == 1
    assert not guard.check(model, optimizer, scaler=scaler)


def test_values_out_of_range_are_refused():
    with pytest.raises(ValueError, match="every"):
        hvd.Guard(every=0)
    with pytest.raises(ValueError, match="on_divergence"):
        hvd.Guard(on_divergence="ignore")
