"""Ranks that take steps alone and meet follow the rule to the number (1, 2 and 4 ranks)."""

import logging

import numpy as np
import pytest
import torch

import hvdsync.torch as hvd
from hvdsync.errors import HvdsyncError, NonFiniteGradient, RankMismatch, ReplicaMismatch
from tests.parallel import golden_updates as golden
from tests.parallel.torch.helpers import assert_equal_on_all_ranks


def linear():
    weight, bias = golden.initial()
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(weight.T))
        model.bias.copy_(torch.tensor(bias))
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), golden.RATE, golden.MOMENTUM)


def distributed(rule, model=None, **options):
    model = linear() if model is None else model
    return hvd.distribute(model, sgd(model), update=rule, **options)


def rule_of(name):
    kind, options = golden.RULES[name]
    return getattr(hvd, kind)(**options)


def train(model, optimizer, step):
    x, y = map(torch.tensor, golden.batch(hvd.rank(), step))
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def values(model):
    weight, bias = (p.detach().numpy().copy() for p in model.parameters())
    return [weight.T, bias]


def assert_follows(model, expected, step):
    for found, wanted in zip(values(model), expected[step][hvd.rank()], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6, err_msg=f"step {step}")


@pytest.mark.parametrize("name", golden.RULES)
def test_every_step_of_each_rank_is_that_of_the_rule(name):
    model, optimizer = distributed(rule_of(name))
    expected = golden.golden(name, hvd.size())
    for step in range(1, golden.STEPS + 1):
        train(model, optimizer, step)
        assert_follows(model, expected, step)


def test_the_synchronous_rule_averages_gradients():
    model, optimizer = distributed(hvd.Synchronous())
    expected = golden.trajectory(hvd.size(), 1, warmup_steps=golden.STEPS)
    for step in range(1, 4):
        train(model, optimizer, step)
        assert_follows(model, expected, step)


def test_gradients_of_several_passes_are_one_local_step():
    model, optimizer = distributed(hvd.LocalSGD(2), accumulate=2)
    expected = golden.trajectory(hvd.size(), 2)
    for step in range(1, 5):
        x, y = map(torch.tensor, golden.batch(hvd.rank(), step))
        optimizer.zero_grad()
        for part in (slice(0, 2), slice(2, 4)):
            torch.nn.functional.mse_loss(model(x[part]), y[part]).backward()
        optimizer.step()
        assert_follows(model, expected, step)


def test_replicas_are_said_to_be_equal_when_they_are():
    model, optimizer = distributed(hvd.LocalSGD(3, warmup_steps=1))
    said = [optimizer.replicas_equal]
    for step in range(1, 8):
        train(model, optimizer, step)
        said.append(optimizer.replicas_equal)
        if said[-1]:
            assert_equal_on_all_ranks(model.parameters())
    between = hvd.size() == 1
    assert said == [True, True, between, between, True, between, between, True]


@pytest.mark.parametrize("name", ["in fragments", "DiLoCo"])
def test_an_early_meeting_makes_all_state_equal_and_is_a_step_of_the_rule(name):
    model, optimizer = distributed(rule_of(name))
    expected = golden.golden(name, hvd.size(), extra_meetings=(5,))
    for step in range(1, golden.STEPS + 1):
        train(model, optimizer, step)
        if step == 5:
            optimizer.synchronize_replicas()
            optimizer.synchronize_replicas()  # of those that are equal, nothing happens
            assert optimizer.replicas_equal
            momentum = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
            assert_equal_on_all_ranks([*model.parameters(), *momentum])
            hvd.check_replicas(model, optimizer)
        assert_follows(model, expected, step)


def test_buffers_meet_as_means_and_counts_as_those_of_rank_0():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2, momentum=0.0))
    model, optimizer = distributed(hvd.LocalSGD(4, fragments=2), model)
    mean, count = model[1].running_mean, model[1].num_batches_tracked
    mean.fill_(hvd.rank())
    count.fill_(10 + hvd.rank())
    train(model, optimizer, 1)
    assert (mean.tolist(), int(count)) == ([hvd.rank()] * 2, 11 + hvd.rank())
    train(model, optimizer, 2)  # the second part meets, and they with it
    assert (mean.tolist(), int(count)) == ([(hvd.size() - 1) / 2] * 2, 12)


def test_a_group_that_is_added_meets_like_the_others():
    model, optimizer = distributed(hvd.DiLoCo(2, outer_lr=1.0, outer_momentum=0.0))
    train(model, optimizer, 1)
    added = torch.nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [added], "lr": 1.0, "momentum": 0.0})
    optimizer.zero_grad()
    (model(torch.ones(1, 3)).sum() + (added * hvd.rank()).sum()).backward()
    optimizer.step()
    mean = (hvd.size() - 1) / 2
    np.testing.assert_allclose(added.detach().numpy(), -mean, rtol=1e-6)
    assert_equal_on_all_ranks([*model.parameters(), added])


@pytest.mark.parametrize("name", ["after a warm-up", "in fragments", "DiLoCo", "all of it"])
def test_a_run_that_is_resumed_comes_to_the_same_bits(name, shared_path):
    model, optimizer = distributed(rule_of(name))
    with hvd.Checkpoint(shared_path / name) as checkpoint:
        for step in range(1, golden.STEPS + 1):
            train(model, optimizer, step)
            if step == 5:
                checkpoint.save(step, model=model, optimizer=optimizer)
                assert_equal_on_all_ranks(model.parameters())
        again, resumed = distributed(rule_of(name), torch.nn.Linear(3, 2))
        checkpoint.restore(model=again, optimizer=resumed)
        for step in range(6, golden.STEPS + 1):
            train(again, resumed, step)
    for found, wanted in zip(values(again), values(model), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_the_state_of_a_rule_loads_into_a_plain_optimizer_and_into_another_rule():
    model, optimizer = distributed(hvd.DiLoCo(3))
    for step in (1, 2, 3):
        train(model, optimizer, step)
    state = optimizer.state_dict()
    assert state["update_rule"]["steps"] == 3
    for anchor, parameter in zip(state["update_rule"]["anchor"], model.parameters(), strict=True):
        torch.testing.assert_close(anchor, parameter.detach(), rtol=0, atol=0)
    plain = sgd(model)
    plain.load_state_dict(state)
    assert set(plain.state_dict()) == {"state", "param_groups"}
    _, other = distributed(hvd.LocalSGD(2, warmup_steps=9), model)
    other.load_state_dict(state)
    assert other.state_dict()["update_rule"] == {"steps": 3}
    assert other.replicas_equal


@pytest.mark.usefixtures("several_ranks")
def test_a_guard_compares_what_has_met_and_nothing_else():
    model, optimizer = distributed(hvd.LocalSGD(2))
    guard = hvd.Guard(every=1)
    train(model, optimizer, 1)
    assert not guard.check(model, optimizer)
    with pytest.raises(HvdsyncError, match="synchronize_replicas"):
        hvd.check_replicas(model, optimizer)
    train(model, optimizer, 2)
    assert not guard.check(model, optimizer)
    train(model, optimizer, 3)
    guard.check(model, optimizer)
    train(model, optimizer, 4)
    if hvd.rank() == 1:
        model.bias.data[0] += 1
    with pytest.raises(ReplicaMismatch, match="'bias'"):
        guard.check(model, optimizer)
    mending = hvd.Guard(every=1, on_divergence="repair")
    assert mending.check(model, optimizer)
    assert_equal_on_all_ranks(model.parameters())


@pytest.mark.usefixtures("several_ranks")
def test_a_guard_of_distribute_waits_for_a_meeting():
    guard = hvd.Guard(every=3)
    model, optimizer = distributed(hvd.LocalSGD(4), guard=guard)
    compared = []
    optimizer.register_step_post_hook(lambda *_: compared.append(guard._comparison_is_due))
    for step in range(1, 9):
        train(model, optimizer, step)
    # Due after 3 and 6, made when replicas met: after 4 and 8.
    assert compared == [False, False, True, False, False, True, True, False]


def poison(model, rank, value=float("nan")):
    """A gradient of one rank's bias that is not finite."""

    def hook(gradient):
        return gradient * value if hvd.rank() == rank else gradient

    return model.bias.register_hook(hook)


@pytest.mark.usefixtures("several_ranks")
def test_a_rank_leaves_its_own_bad_step_out_and_says_so(caplog):
    guard = hvd.Guard(on_nonfinite="skip")
    model, optimizer = distributed(hvd.LocalSGD(2), guard=guard)
    hook = poison(model, rank=1)
    before = values(model)
    with caplog.at_level(logging.WARNING):
        train(model, optimizer, 1)
    hook.remove()
    kept = all(np.array_equal(a, b) for a, b in zip(values(model), before, strict=True))
    assert (guard.skipped, kept) == ((1, True) if hvd.rank() == 1 else (0, False))
    said = "step 1: gradients are not finite: rank 1: " in caplog.text
    assert (said, "left out on this rank" in caplog.text) == (hvd.rank() == 1,) * 2
    train(model, optimizer, 2)
    assert_equal_on_all_ranks(model.parameters())
    assert all(np.isfinite(v).all() for v in values(model))


@pytest.mark.usefixtures("several_ranks")
def test_parameters_that_are_not_finite_meet_nobody():
    model, optimizer = distributed(hvd.LocalSGD(2), guard=hvd.Guard(on_nonfinite="skip"))
    train(model, optimizer, 1)
    if hvd.rank() == 1:
        model.bias.data[0] = float("inf")
    with pytest.raises(NonFiniteGradient) as error:
        train(model, optimizer, 2)
    text = str(error.value)
    assert "after step 2: parameters are not finite: rank 1: 1 infinite of 2 elements" in text
    assert "'bias' (float32 (2,))" in text
    assert all(np.isfinite(v).all() for v in values(model)) == (hvd.rank() != 1)


@pytest.mark.usefixtures("several_ranks")
def test_ranks_that_took_different_numbers_of_steps_are_told():
    model, optimizer = distributed(hvd.LocalSGD(10))
    for step in range(1, 3 + (hvd.rank() == 1)):
        train(model, optimizer, step)
    with pytest.raises(RankMismatch, match=r"rank 0: 2, rank 1: 3.*GradScaler"):
        optimizer.synchronize_replicas()


@pytest.mark.usefixtures("several_ranks")
def test_rules_that_differ_between_ranks_are_told():
    with pytest.raises(RankMismatch, match=r"rank 0: LocalSGD\(period=2"):
        distributed(hvd.LocalSGD(2 + hvd.rank()))


@pytest.mark.usefixtures("several_ranks")
def test_differences_travel_in_halves():
    exact, optimizer = distributed(hvd.DiLoCo(2))
    halves, with_halves = distributed(hvd.DiLoCo(2), compression=hvd.Compression.fp16)
    for step in (1, 2):
        train(exact, optimizer, step)
        train(halves, with_halves, step)
    assert_equal_on_all_ranks(halves.parameters())
    for found, wanted in zip(values(halves), values(exact), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-3)
        assert not np.array_equal(found, wanted)


def test_combinations_without_sense_are_refused_with_the_reason():
    for reason, options in (
        ("parameters themselves travel", {"compression": hvd.Compression.fp16}),
        ("have a mean and no sum", {"op": hvd.Sum}),
        ("global one", {"process_set": hvd.ProcessSet([0])}),
    ):
        with pytest.raises(ValueError, match=reason):
            distributed(hvd.LocalSGD(2), **options)


def test_local_sgd_alone_is_the_plain_optimizer_bit_for_bit():
    if hvd.size() > 1:
        pytest.skip("of one rank")
    model, plain = linear(), linear()
    ours, theirs = distributed(hvd.LocalSGD(2), model)[1], sgd(plain)
    for step in range(1, 6):
        train(model, ours, step)
        train(plain, theirs, step)
    for found, wanted in zip(values(model), values(plain), strict=True):
        np.testing.assert_array_equal(found, wanted)
