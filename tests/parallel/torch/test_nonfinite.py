"""A NaN on one rank is one verdict on all, before the update (1, 2 and 4 ranks)."""

import copy
import io
import logging

import pytest
import torch

import hvdsync.torch as hvd
from hvdsync.errors import NonFiniteGradient, RankMismatch, ReplicaMismatch
from tests.parallel.torch.helpers import assert_equal_on_all_ranks

NAN, INF = float("nan"), float("inf")


def last():
    return hvd.size() - 1


def net():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 1))


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
}


def distributed(guard, optimizer="sgd", model=None, **options):
    model = net() if model is None else model
    return hvd.distribute(model, OPTIMIZERS[optimizer](model.parameters()), guard=guard, **options)


def batch(step=0):
    generator = torch.Generator().manual_seed(100 * step + hvd.rank())
    return torch.randn(6, 5, generator=generator)


def damage(parameter, *values, rank=None):
    """Puts values into the first elements of a gradient before it is reduced, on one rank."""

    def hook(gradient):
        gradient = gradient.clone()
        if hvd.rank() == (last() if rank is None else rank):
            gradient.view(-1)[: len(values)] = torch.tensor(values, dtype=gradient.dtype)
        return gradient

    return parameter.register_hook(hook)


def step(model, optimizer, x=None):
    optimizer.zero_grad()
    model(batch() if x is None else x).square().mean().backward()
    optimizer.step()


def state(model, optimizer):
    """All numbers of model and optimizer, as they are now."""
    slots = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    return [t.detach().clone() for t in (*model.state_dict().values(), *slots)]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def refusal_of(action):
    """What every rank is told; only its first words are each rank's own."""
    with pytest.raises(NonFiniteGradient) as error:
        action()
    text = str(error.value)
    assert text.startswith(f"rank {hvd.rank()} of {hvd.size()}: ")
    assert len(set(hvd.allgather_object(text.partition(": ")[2]))) == 1
    return text


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if r.name.startswith("hvdsync.guard")]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_raise_names_rank_step_tensor_counts_and_a_finite_input(optimizer):
    guard = hvd.Guard(on_nonfinite="raise")
    model, optimizer = distributed(guard, optimizer)
    step(model, optimizer)
    before = state(model, optimizer)
    damage(model[0].weight, NAN, NAN, INF)
    damage(model[2].bias, -INF)
    text = refusal_of(lambda: step(model, optimizer))
    assert "step 2:" in text
    assert (
        f"rank {last()}: 2 NaN and 1 infinite of 35 elements in '0.weight' (float32 (7, 5))" in text
    )
    assert "first of 2 tensors" in text
    assert "its input was finite" in text
    assert text.count("elements in") == 1  # no other rank is accused
    assert str(guard.failure) == text
    assert_same(state(model, optimizer), before)


def test_an_input_that_was_bad_already_is_told():
    model, optimizer = distributed(hvd.Guard())
    x = batch()
    if hvd.rank() == 0:
        x[2, 1] = NAN
        x[3, 1:3] = INF
    text = refusal_of(lambda: step(model, optimizer, x))
    assert "rank 0: " in text
    assert "its input was bad already (1 NaN and 2 infinite elements)" in text
    assert "what that rank read" in text


def test_each_bad_rank_is_named_with_its_own_input():
    if hvd.size() < 2:
        pytest.skip("one rank")
    model, optimizer = distributed(hvd.Guard())
    damage(model[2].weight, NAN, rank=0)
    x = batch()
    if hvd.rank() == 1:
        x[0, 0] = NAN
    text = refusal_of(lambda: step(model, optimizer, x))
    assert "rank 0: 1 NaN of 7 elements in '2.weight'" in text
    assert "rank 1: 5 NaN" in text or "rank 1: 7 NaN" in text or "rank 1: 35 NaN" in text
    assert "its input was finite" in text
    assert "its input was bad already (1 NaN elements)" in text


def test_an_input_that_no_model_was_called_with_was_not_seen():
    guard = hvd.Guard()
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), guard=guard)
    damage(weight, NAN)

    def run():
        weight.sum().backward()
        optimizer.step()

    text = refusal_of(run)
    assert "1 NaN of 3 elements in 'group0.param0' (float32 (3,)); its input was not seen" in text


def test_a_batch_can_be_shown_by_hand():
    guard = hvd.Guard()
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), guard=guard)
    x = torch.tensor([1.0, NAN, INF] if hvd.rank() == last() else [1.0, 1.0, 1.0])
    guard.watch({"x": [x, torch.arange(3)]}, "a name")

    def run():
        (weight * x).sum().backward()
        optimizer.step()

    assert "its input was bad already (1 NaN and 1 infinite elements)" in refusal_of(run)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_skip_leaves_weights_and_optimizer_state_alone_and_goes_on(optimizer, caplog):
    guard = hvd.Guard(on_nonfinite="skip")
    model, optimizer = distributed(guard, optimizer)
    step(model, optimizer)
    before = state(model, optimizer)
    hook = damage(model[2].weight, NAN)
    with caplog.at_level(logging.WARNING, logger="hvdsync.guard"):
        step(model, optimizer)
        step(model, optimizer)
    assert guard.skipped == 2
    assert_same(state(model, optimizer), before)
    told = warnings_of(caplog)
    if hvd.rank() == 0:
        assert len(told) == 2
        assert f"step 2: gradients are not finite: rank {last()}: 1 NaN of 7" in told[0]
        assert "left out on all ranks, 2 so far" in told[1]
    else:
        assert told == []
    hook.remove()
    step(model, optimizer)
    assert guard.skipped == 2
    assert not torch.equal(model[0].weight, before[0])
    assert all(t.isfinite().all() for t in state(model, optimizer))
    assert_equal_on_all_ranks(state(model, optimizer))


def test_a_skipped_step_changes_nothing_of_the_steps_after_it():
    guard = hvd.Guard(on_nonfinite="skip")
    model, optimizer = distributed(guard, "adam")
    reference, other = distributed(hvd.Guard(), "adam")
    for number in range(4):
        hook = damage(model[0].bias, INF) if number == 1 else None
        step(model, optimizer, batch(number))
        if hook:
            hook.remove()
        else:
            step(reference, other, batch(number))
    assert guard.skipped == 1
    assert_same(state(model, optimizer), state(reference, other))


def test_warn_makes_the_update_and_rank_zero_says_so(caplog):
    guard = hvd.Guard(on_nonfinite="warn")
    model, optimizer = distributed(guard)
    damage(model[2].bias, NAN)
    with caplog.at_level(logging.WARNING, logger="hvdsync.guard"):
        step(model, optimizer)
    assert model[2].bias.isnan().all()
    assert model[0].weight.isfinite().all()
    assert guard.skipped == 0
    told = warnings_of(caplog)
    assert len(told) == (hvd.rank() == 0)
    if told:
        assert "'2.bias'" in told[0] and "made all the same" in told[0]


def test_clipping_a_bad_gradient_does_not_hide_where_it_came_from():
    guard = hvd.Guard()
    model, optimizer = distributed(guard)
    damage(model[2].weight, INF)

    def run():
        model(batch()).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    text = refusal_of(run)
    assert "1 infinite of 7 elements in '2.weight'" in text and "first of" not in text


def test_finite_gradients_whose_sum_overflows_are_no_ranks_fault():
    if hvd.size() < 2:
        pytest.skip("one rank sums nothing")
    model, optimizer = distributed(hvd.Guard())
    before = state(model, optimizer)
    for rank in range(hvd.size()):
        damage(model[2].weight, 3e38, 1.0, 3e38, rank=rank)
    text = refusal_of(lambda: step(model, optimizer))
    assert "their sum over ranks is not: it overflows in 2 of 7 elements of '2.weight'" in text
    assert_same(state(model, optimizer), before)


def test_large_gradients_that_are_finite_are_let_through():
    guard = hvd.Guard()
    model, optimizer = distributed(guard)
    damage(model[2].weight, 1e30)
    before = state(model, optimizer)
    step(model, optimizer)
    assert model[2].weight.isfinite().all()
    assert abs(model[2].weight.detach()[0, 0]) > 1e28
    assert not torch.equal(model[0].weight, before[0])
    assert guard.failure is None


def test_half_precision_on_the_wire_overflows_where_no_gradient_did():
    if hvd.size() < 2:
        pytest.skip("nothing travels")
    model, optimizer = distributed(hvd.Guard(), compression=hvd.Compression.fp16)
    step(model, optimizer)
    damage(model[0].weight, 1e6)
    text = refusal_of(lambda: step(model, optimizer))
    assert "overflows in 1 of 35 elements of '0.weight'" in text
    assert "half precision ends at 65,504" in text


def test_half_precision_on_the_wire_near_its_end_is_let_through():
    model, optimizer = distributed(hvd.Guard(), compression=hvd.Compression.fp16)
    damage(model[0].weight, 6e4)
    step(model, optimizer)
    assert model[0].weight.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_judged(dtype):
    model = net().to(dtype)
    model, optimizer = distributed(hvd.Guard(), model=model)
    step(model, optimizer, batch().to(dtype))
    damage(model[2].bias, NAN)
    text = refusal_of(lambda: step(model, optimizer, batch().to(dtype)))
    assert f"1 NaN of 1 elements in '2.bias' ({str(dtype)[6:]} (1,))" in text


def test_sparse_gradients_are_judged():
    guard = hvd.Guard(on_nonfinite="skip")
    model = torch.nn.Sequential(torch.nn.Embedding(10, 3, sparse=True), torch.nn.Linear(3, 1))
    model, optimizer = hvd.distribute(model, torch.optim.SGD(model.parameters(), 0.1), guard=guard)

    def run(bad):
        optimizer.zero_grad()
        rows = model[0](torch.tensor([hvd.rank(), 5]))
        scale = NAN if bad and hvd.rank() == last() else 1.0
        # Of the looked-up rows only: the layer above stays finite.
        rows.register_hook(lambda g: g * torch.tensor([scale, 1.0])[:, None])
        model[1](rows).sum().backward()
        optimizer.step()

    for _ in range(2):  # found to be sparse in the first step
        run(False)
    before = state(model, optimizer)
    run(True)
    assert guard.skipped == 1
    assert_same(state(model, optimizer), before)
    run(False)
    assert guard.skipped == 1
    guard.on_nonfinite = "raise"
    text = refusal_of(lambda: run(True))
    assert f"rank {last()}: 3 NaN of 30 elements in '0.weight'" in text


@pytest.mark.parametrize("bad_pass", [0, 1])
def test_a_bad_pass_among_several_is_found_with_its_input(bad_pass):
    model, optimizer = distributed(hvd.Guard(), accumulate=2)
    before = state(model, optimizer)

    def run():
        optimizer.zero_grad()
        for number in range(2):
            x = batch(number)
            if number == bad_pass and hvd.rank() == last():
                x[0, 0] = INF
            model(x).square().mean().backward()
        optimizer.step()

    text = refusal_of(run)
    assert "step 1:" in text and f"rank {last()}: " in text
    assert "its input was bad already (1 infinite elements)" in text
    assert_same(state(model, optimizer), before)


def test_a_rank_without_a_backward_pass_hears_the_verdict_too():
    if hvd.size() < 2:
        pytest.skip("one rank")
    model, optimizer = distributed(hvd.Guard(on_nonfinite="skip"))
    step(model, optimizer)
    before = state(model, optimizer)
    damage(model[0].weight, NAN, rank=0)
    optimizer.zero_grad()
    if hvd.rank() == 0:
        model(batch()).square().mean().backward()
    optimizer.step()
    assert_same(state(model, optimizer), before)


def test_a_loss_that_is_nan_counts_where_its_gradient_is_finite():
    guard = hvd.Guard()
    model, optimizer = distributed(guard)
    before = state(model, optimizer)

    def run():
        loss = model(batch()).square().mean()
        if hvd.rank() == last():
            loss = loss + NAN
        guard.watch(loss=loss)
        loss.backward()
        optimizer.step()

    text = refusal_of(run)
    assert f"rank {last()}: a loss that is NaN or infinite, and its gradients are finite" in text
    assert_same(state(model, optimizer), before)


def test_a_scaler_leaves_out_its_steps_before_any_verdict():
    guard = hvd.Guard()
    model, optimizer = distributed(guard)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def run():
        optimizer.zero_grad()
        scaler.scale(model(batch()).square().mean()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    run()
    before = state(model, optimizer)
    hook = damage(model[0].weight, INF)
    run()
    hook.remove()
    assert scaler.get_scale() == 2.0**9
    assert_same(state(model, optimizer), before)
    run()
    assert guard.failure is None and guard.skipped == 0
    assert not torch.equal(model[0].weight, before[0])
    assert_equal_on_all_ranks(state(model, optimizer))


def test_a_fused_optimizer_that_a_scaler_calls_at_every_step_is_left_to_it():
    guard = hvd.Guard()
    model = net()
    model, optimizer = hvd.distribute(
        model, torch.optim.Adam(model.parameters(), 0.01, fused=True), guard=guard
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    damage(model[0].weight, NAN)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.zero_grad()
    scaler.scale(model(batch()).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**9
    assert_same([p.detach() for p in model.parameters()], before)
    assert guard.failure is None


def test_a_gradient_that_nobody_took_a_step_with_is_forgotten():
    model, optimizer = distributed(hvd.Guard())
    hook = damage(model[0].weight, NAN)
    model(batch()).square().mean().backward()
    hook.remove()
    step(model, optimizer)
    assert model[0].weight.isfinite().all()


def test_a_gradient_that_was_thrown_away_is_forgotten_without_another_one():
    model, optimizer = distributed(hvd.Guard(), "adam")
    damage(model[0].weight, NAN)
    model(batch()).square().mean().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert model[0].weight.isfinite().all()


def test_a_gradient_that_another_one_took_the_place_of_is_forgotten():
    model, optimizer = distributed(hvd.Guard())
    hook = damage(model[0].weight, NAN)
    model(batch()).square().mean().backward()
    hook.remove()
    model.zero_grad()
    model(batch()).square().mean().backward()
    optimizer.step()
    assert model[0].weight.isfinite().all()


def test_gradients_put_in_place_by_hand_are_judged():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], 0.1), guard=hvd.Guard())
    weight.grad = torch.tensor([1.0, INF, 1.0] if hvd.rank() == last() else [1.0, 1.0, 1.0])
    assert f"rank {last()}: 1 infinite of 3 elements" in refusal_of(optimizer.step)
    assert torch.equal(weight, torch.ones(3))


def test_only_the_input_of_this_step_counts():
    guard = hvd.Guard()
    model, optimizer = distributed(guard)
    guard.watch(torch.tensor([NAN]))
    step(model, optimizer)
    with torch.no_grad():
        model(torch.full((1, 5), NAN))
    damage(model[0].weight, NAN)
    assert "its input was finite" in refusal_of(lambda: step(model, optimizer))


def test_two_optimizers_are_judged_each_for_itself():
    guard = hvd.Guard(on_nonfinite="skip")
    first, one = distributed(guard)
    second, two = distributed(guard, model=torch.nn.Linear(5, 1))
    before = state(first, one), state(second, two)
    damage(first[0].weight, NAN)
    step(first, one)
    step(second, two)
    assert guard.skipped == 1
    assert_same(state(first, one), before[0])
    assert not torch.equal(second.weight, before[1][0])


def test_a_closure_is_judged_before_the_update():
    guard = hvd.Guard(on_nonfinite="skip")
    model = net()
    model, optimizer = hvd.distribute(
        model, torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3), guard=guard
    )
    before = state(model, optimizer)
    hook = damage(model[0].weight, NAN)

    def closure():
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert guard.skipped >= 1
    for found, expected in zip(model.state_dict().values(), before, strict=False):
        assert torch.equal(found, expected)
    guard.on_nonfinite = "raise"
    assert "'0.weight'" in refusal_of(lambda: optimizer.step(closure))
    hook.remove()
    optimizer.step(closure)
    assert not torch.equal(model[0].weight, before[0])
    assert_equal_on_all_ranks(model.state_dict().values())


def test_without_trouble_a_guard_changes_no_bit():
    plain, guarded = distributed(None), distributed(hvd.Guard(every=2))
    for number in range(4):
        step(*plain, batch(number))
        step(*guarded, batch(number))
    assert_same(state(*guarded), state(*plain))


def test_replicas_are_compared_after_every_so_many_updates():
    if hvd.size() < 2:
        pytest.skip("one rank")
    model, optimizer = distributed(hvd.Guard(every=3))
    step(model, optimizer)
    if hvd.rank() == 0:
        model[0].weight.data[0, 0] += 1
    step(model, optimizer)
    with pytest.raises(ReplicaMismatch, match=r"0\.weight"):
        step(model, optimizer)


def test_the_steps_of_the_run_that_is_resumed_are_added():
    guard = hvd.Guard()
    guard.steps_before = 340
    model, optimizer = distributed(guard)
    damage(model[0].weight, NAN)
    assert "step 341:" in refusal_of(lambda: step(model, optimizer))


def test_a_policy_of_one_rank_alone_is_refused():
    if hvd.size() < 2:
        pytest.skip("one rank")
    policy = "skip" if hvd.rank() == 0 else "raise"
    with pytest.raises(RankMismatch, match=r"on_nonfinite.*'?skip'?"):
        distributed(hvd.Guard(on_nonfinite=policy))


def test_adasum_is_refused():
    with pytest.raises(ValueError, match="Adasum"):
        distributed(hvd.Guard(), op=hvd.Adasum)


def test_copies_and_saved_models_see_nothing_and_need_nothing():
    guard = hvd.Guard()
    model, _ = distributed(guard)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"hvdsync" not in file.getvalue()
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(other(batch()), model(batch()))
    assert len(guard._batches) == 2


def test_values_out_of_range_are_refused():
    with pytest.raises(ValueError, match="on_nonfinite is 'ignore'"):
        hvd.Guard(on_nonfinite="ignore")
