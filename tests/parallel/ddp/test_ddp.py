"""``engine="ddp"``: gradients of a model that is distributed, and what stays as it was."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import hvdsync.torch as hvd
from hvdsync.errors import HvdsyncError, NonFiniteGradient, RankMismatch, ReplicaMismatch
from tests.parallel.ranks import shard
from tests.parallel.torch.helpers import assert_equal_on_all_ranks

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Net(nn.Module):
    """``aside`` is used on request only, ``never`` not at all; ``table`` is no parameter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.last = nn.Linear(7, 3)
        self.aside = nn.Linear(5, 3)
        self.never = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(3))

    def forward(self, x, *, aside=False):
        y = self.last(self.first(x).tanh())
        return y + self.aside(x) if aside else y


def make():
    model = Net()
    return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


def distributed(**options):
    torch.manual_seed(5 + hvd.rank())  # replicas are equal only because rank 0's is given to all
    return hvd.distribute(*make(), **options)


def alone():
    torch.manual_seed(5)
    return make()


def batch(seed, per_rank=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(per_rank * hvd.size(), 5, generator=generator)


def mean_loss(model, x, **options):
    return model(x, **options).square().mean()


def assert_equal_parameters(model, expected):
    for (name, found), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, other, **CLOSE, msg=lambda text, n=name: f"{n}: {text}")
    assert_equal_on_all_ranks(list(model.parameters()))


def assert_equal_gradients(model, expected):
    for (name, found), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert (found.grad is None) == (other.grad is None), name
        if other.grad is not None:
            torch.testing.assert_close(found.grad, other.grad, **CLOSE)


def test_training_is_that_of_one_process_on_all_samples():
    (model, optimizer), (expected, plain) = distributed(), alone()
    for step in range(4):
        x = batch(step)
        for net, opt, part in ((model, optimizer, shard(x)[0]), (expected, plain, x)):
            opt.zero_grad()
            mean_loss(net, part).backward()
            opt.step()
    assert_equal_parameters(model, expected)


def test_gradients_are_averages_when_backward_returns():
    (model, _), (expected, _) = distributed(), alone()
    x = batch(0)
    mean_loss(model, *shard(x)).backward()
    mean_loss(expected, x).backward()
    assert_equal_gradients(model, expected)
    assert model.never.weight.grad is None  # so that weight decay leaves it alone


def test_what_only_some_ranks_use_counts_as_zero_on_the_others():
    (model, _), (expected, _) = distributed(), alone()
    x = batch(0)
    mean_loss(model, *shard(x), aside=hvd.rank() == 0).backward()
    losses = [mean_loss(expected, x[r :: hvd.size()], aside=r == 0) for r in range(hvd.size())]
    (sum(losses) / hvd.size()).backward()
    assert_equal_gradients(model, expected)


def test_frozen_parameters_are_reduced_from_when_they_are_unfrozen():
    (model, optimizer), (expected, plain) = distributed(), alone()
    for net in (model, expected):
        net.first.requires_grad_(False)
    for step in range(4):
        if step == 2:
            for net in (model, expected):
                net.first.requires_grad_(True)
                net.last.requires_grad_(False)
        x = batch(step)
        for net, opt, part in ((model, optimizer, shard(x)[0]), (expected, plain, x)):
            opt.zero_grad()
            mean_loss(net, part).backward()
            opt.step()
    assert_equal_parameters(model, expected)


def test_accumulated_passes_are_averaged_and_reduced_at_the_last(several_ranks):
    (model, _), (expected, _) = distributed(accumulate=3), alone()
    whole = [batch(step) for step in range(3)]
    for x in whole[:2]:
        mean_loss(model, *shard(x)).backward()
    sums = hvd.allgather_object(model.last.bias.grad.sum().item())
    assert len(set(sums)) == hvd.size(), "gradients travelled before the last pass"
    mean_loss(model, *shard(whole[2])).backward()
    (sum(mean_loss(expected, x) for x in whole) / 3).backward()
    assert_equal_gradients(model, expected)


def test_a_shorter_last_step_has_its_true_average():
    (model, optimizer), (expected, plain) = distributed(accumulate=3), alone()
    whole = [batch(step) for step in range(5)]
    for i, x in enumerate(whole):
        mean_loss(model, *shard(x)).backward()
        if i in (2, 4):
            optimizer.step()
            optimizer.zero_grad()
    for part in (whole[:3], whole[3:]):
        (sum(mean_loss(expected, x) for x in part) / len(part)).backward()
        plain.step()
        plain.zero_grad()
    assert_equal_parameters(model, expected)


def test_no_sync_only_accumulates():
    (model, optimizer), (expected, _) = distributed(), alone()
    first, second = batch(1), batch(2)
    with optimizer.no_sync():
        mean_loss(model, *shard(first)).backward()
    mean_loss(model, *shard(second)).backward()
    (mean_loss(expected, first) + mean_loss(expected, second)).backward()
    assert_equal_gradients(model, expected)


def test_unequal_shares_average_over_samples_with_loss_scale():
    (model, _), (expected, _) = distributed(), alone()
    everyone = [batch(r)[: r + 1] for r in range(hvd.size())]
    mine = everyone[hvd.rank()]
    (mean_loss(model, mine) * hvd.loss_scale(len(mine))).backward()
    mean_loss(expected, torch.cat(everyone)).backward()
    assert_equal_gradients(model, expected)


def test_a_rank_without_a_batch_counts_as_zero():
    (model, optimizer), (expected, plain) = distributed(), alone()
    x = batch(0)
    if hvd.rank() == 0:
        mean_loss(model, x).backward()
    optimizer.step()
    (mean_loss(expected, x) / hvd.size()).backward()
    plain.step()
    assert_equal_parameters(model, expected)


def test_a_part_of_the_model_that_was_called_alone_is_reduced_at_the_step():
    (model, optimizer), (expected, plain) = distributed(), alone()
    x = batch(0)
    model.first(*shard(x)).square().mean().backward()
    optimizer.step()
    expected.first(x).square().mean().backward()
    plain.step()
    assert_equal_parameters(model, expected)


def test_a_closure_is_reduced_and_its_loss_averaged():
    torch.manual_seed(2)
    model, expected = nn.Linear(5, 1), nn.Linear(5, 1)
    expected.load_state_dict(model.state_dict())
    plain = torch.optim.LBFGS(expected.parameters(), max_iter=4)
    model, optimizer = hvd.distribute(model, torch.optim.LBFGS(model.parameters(), max_iter=4))
    x = batch(0)
    for net, opt, part in ((model, optimizer, shard(x)[0]), (expected, plain, x)):

        def closure(net=net, opt=opt, part=part):
            opt.zero_grad()
            loss = (net(part) - 1).square().mean()
            loss.backward()
            return loss

        opt.step(closure)
    assert_equal_parameters(model, expected)


@pytest.mark.parametrize(("name", "precision"), [("fp16", 5e-3), ("bf16", 2e-2)])
def test_half_the_bits_on_the_wire_average_within_their_precision(name, precision):
    compression = hvd.Compression.named(name)
    (model, _), (expected, _) = distributed(compression=compression), alone()
    x = batch(0)
    mean_loss(model, *shard(x)).backward()
    mean_loss(expected, x).backward()
    torch.testing.assert_close(
        model.last.weight.grad, expected.last.weight.grad, rtol=precision, atol=precision / 50
    )
    assert model.last.weight.grad.dtype == torch.float32


def test_a_model_that_uses_everything_need_not_be_searched():
    torch.manual_seed(1)
    model, expected = nn.Linear(5, 2), nn.Linear(5, 2)
    expected.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = hvd.distribute(
        model, optimizer, find_unused_parameters=False, bucket_cap_mb=1
    )
    x = batch(0)
    for _ in range(3):  # buckets are made anew after the first
        model.zero_grad()
        model(*shard(x)).square().mean().backward()
    expected(x).square().mean().backward()
    assert_equal_gradients(model, expected)
    optimizer.zero_grad()
    optimizer.step()


def test_synchronised_batch_norm_sees_the_samples_of_all_ranks():
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
    model = nn.Sequential(nn.Linear(5, 4), hvd.SyncBatchNorm(4))
    model.load_state_dict(plain.state_dict())
    model, _ = hvd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    x = batch(0)
    weights = torch.arange(1.0, 5.0)
    (model(*shard(x)).square() * weights).mean().backward()
    (plain(x).square() * weights).mean().backward()
    assert_equal_gradients(model, plain)
    torch.testing.assert_close(model[1].running_var, plain[1].running_var, **CLOSE)


# What the verbs make of it


def test_the_model_is_the_users_own_and_its_state_plain(shared_path):
    model = Net()
    given, optimizer = hvd.distribute(model, torch.optim.Adam(model.parameters()))
    mean_loss(model, *shard(batch(0))).backward()
    optimizer.step()
    assert given is model
    assert set(model.state_dict()) == set(Net().state_dict())
    with hvd.Checkpoint(shared_path) as checkpoint:
        checkpoint.save(1, model=model, optimizer=optimizer)
    written = torch.load(shared_path / "step-00000001" / "model.pt", weights_only=True)
    other = Net()
    other.load_state_dict(written)
    assert_equal_parameters(model, other)


def test_training_goes_on_from_a_checkpoint_to_the_same_bits(shared_path):
    def steps(model, optimizer, first, last):
        for step in range(first, last):
            optimizer.zero_grad()
            mean_loss(model, *shard(batch(step))).backward()
            optimizer.step()

    whole = distributed()
    steps(*whole, 0, 4)
    model, optimizer = distributed()
    steps(model, optimizer, 0, 2)
    with hvd.Checkpoint(shared_path) as checkpoint:
        checkpoint.save(2, model=model, optimizer=optimizer)
    model, optimizer = hvd.distribute(*make())
    with hvd.Checkpoint(shared_path) as checkpoint:
        assert checkpoint.restore(model=model, optimizer=optimizer) is not None
    steps(model, optimizer, 2, 4)
    for found, expected in zip(model.parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(found, expected)


def test_a_copy_of_the_model_is_a_plain_one():
    model, _ = distributed()
    mean_loss(model, *shard(batch(0))).backward()
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        made.zero_grad()
        if hvd.rank() == 0:  # would wait for the others if it were reduced
            mean_loss(made, batch(1)).backward()
            assert made.last.weight.grad is not None


def test_a_gradient_that_is_not_finite_is_one_verdict_before_the_update(several_ranks):
    model, optimizer = distributed(guard=hvd.Guard())
    before = copy.deepcopy(model.state_dict())
    last = hvd.size() - 1
    x = shard(batch(0))[0]
    if hvd.rank() == last:
        x[0, 0] = float("nan")
    mean_loss(model, x).backward()
    with pytest.raises(
        NonFiniteGradient, match=rf"(?s)rank {hvd.rank()} of .*first\.weight"
    ) as caught:
        optimizer.step()
    assert f"rank {last}" in str(caught.value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_steps_with_bad_gradients_are_left_out_on_all_ranks():
    guard = hvd.Guard(on_nonfinite="skip")
    (model, optimizer), (expected, plain) = distributed(guard=guard, accumulate=2), alone()
    for step in range(3):
        x = [batch(step), batch(step + 10)]
        for part in x:
            mine = shard(part)[0].clone()
            if step == 1 and hvd.rank() == hvd.size() - 1:
                mine[0, 0] = float("inf")
            mean_loss(model, mine).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step != 1:
            plain.zero_grad()
            (sum(mean_loss(expected, part) for part in x) / 2).backward()
            plain.step()
    assert guard.skipped == 1
    assert_equal_parameters(model, expected)


def test_a_guard_finds_a_flipped_bit_and_repairs_it(several_ranks):
    guard = hvd.Guard(every=2, on_divergence="repair")
    model, optimizer = distributed(guard=guard)
    for step in range(2):
        if step == 1 and hvd.rank() == hvd.size() - 1:
            with torch.no_grad():
                model.last.weight.view(torch.int32)[0, 0] ^= 1
            with pytest.raises(ReplicaMismatch, match=r"last\.weight"):
                hvd.check_replicas(model)
        elif step == 1:
            with pytest.raises(ReplicaMismatch, match=r"last\.weight"):
                hvd.check_replicas(model)
        optimizer.zero_grad()
        mean_loss(model, *shard(batch(step))).backward()
        optimizer.step()
    assert guard.repairs == 1
    hvd.check_replicas(model, optimizer)


# What is refused


def test_different_models_are_refused_on_every_rank(several_ranks):
    model = nn.Linear(5, 2 + hvd.rank())
    with pytest.raises(RankMismatch, match="weight"):
        hvd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))


def test_a_parameter_that_no_model_has_is_refused(several_ranks):
    model, own = Net(), nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match=r"not the model's \(group0.param0\)"):
        hvd.distribute(model, torch.optim.SGD([own, *model.parameters()], 0.1))


def test_what_is_horovods_says_so(several_ranks):
    model, optimizer = make()
    with pytest.raises(ValueError, match=r"init\(\) started 'ddp'"):
        hvd.distribute(model, optimizer, engine="horovod")
    with pytest.raises(ValueError, match=r"call distribute\(model, optimizer\)"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match="groups; expected keyword arguments of Distributed"):
        hvd.distribute(model, optimizer, groups=2)
    with pytest.raises(ValueError, match="even_batches"):
        hvd.join()


def test_an_optimizer_whose_model_went_to_another_does_not_train_it_alone(several_ranks):
    model, plain = make()
    _, first = hvd.distribute(model, plain)
    _, second = hvd.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    mean_loss(model, *shard(batch(0))).backward()
    second.step()
    with pytest.raises(HvdsyncError, match="distributed again"):
        first.step()


def test_a_step_that_reduces_nothing_is_an_error(several_ranks):
    model, optimizer = distributed()
    model.requires_grad_(False)
    with pytest.raises(HvdsyncError, match="no parameter of the model requires a gradient"):
        optimizer.step()


def test_a_world_ends_and_begins_anew():
    model, optimizer = distributed()
    x = batch(0)
    mean_loss(model, *shard(x)).backward()
    optimizer.step()
    hvd.shutdown()
    try:
        model.zero_grad()
        mean_loss(model, x).backward()  # reduces nothing
        assert model.last.weight.grad is not None
    finally:
        hvd.init(engine="ddp")
    test_training_is_that_of_one_process_on_all_samples()


def test_a_model_lets_go_of_a_world_that_ends():
    """Who drops a process group after the others waits for its threads, which may wait for it."""
    model, optimizer = distributed()
    mean_loss(model, *shard(batch(0))).backward()
    wrapper = weakref.ref(optimizer._reducer._ddp)
    assert wrapper() is not None
    hvd.shutdown()
    try:
        assert wrapper() is None
        optimizer.step()  # of a model that computes alone
    finally:
        hvd.init(engine="ddp")
    optimizer.zero_grad()
    x = batch(1)
    mean_loss(model, *shard(x)).backward()
    reduced = model.last.weight.grad.clone()
    model.zero_grad()
    with optimizer.no_sync():
        mean_loss(model, x).backward()
    torch.testing.assert_close(reduced, model.last.weight.grad)


def test_a_model_that_nobody_uses_is_forgotten():
    model, optimizer = distributed()
    mean_loss(model, *shard(batch(0))).backward()
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
