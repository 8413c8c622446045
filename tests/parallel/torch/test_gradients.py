"""What ``.grad`` holds after backward, for the ways in which ranks and steps can be uneven."""

import pytest
import torch
from torch import nn

import hvdsync.torch as hvd
from hvdsync.errors import HvdsyncError, RankMismatch
from tests.parallel.torch.helpers import assert_equal_on_all_ranks


def scalar_model(value=0.0):
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def sgd(model, **options):
    return hvd.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0), **options)


def ones(value=1.0, rows=1):
    return torch.full((rows, 1), float(value))


def mean_over_ranks(value_of_rank):
    return sum(value_of_rank(r) for r in range(hvd.size())) / hvd.size()


def test_gradients_are_averaged_when_backward_returns():
    model, optimizer = sgd(scalar_model())
    model(ones(hvd.rank() + 1)).sum().backward()
    assert model.weight.grad.item() == mean_over_ranks(lambda r: r + 1)
    optimizer.step()
    assert model.weight.item() == -mean_over_ranks(lambda r: r + 1)


def test_a_layer_used_on_one_rank_only_counts_as_zero_on_the_others():
    model = nn.ModuleList([scalar_model(), scalar_model()])
    model, optimizer = sgd(model)
    out = model[0](ones())
    if hvd.rank() == 0:
        out = out + model[1](ones())
    out.sum().backward()
    optimizer.step()
    assert model[1].weight.item() == pytest.approx(-1 / hvd.size(), rel=1e-6)
    assert_equal_on_all_ranks(model.parameters())


def test_a_layer_used_on_no_rank_keeps_no_gradient_and_is_not_decayed():
    model = nn.ModuleList([scalar_model(1.0), scalar_model(1.0)])
    model, optimizer = hvd.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.5)
    )
    model[0](ones()).sum().backward()
    optimizer.step()
    assert model[1].weight.grad is None
    assert model[1].weight.item() == 1.0
    assert model[0].weight.item() == 1.0 - 0.5 * (1.0 + 0.5)


def test_a_rank_without_any_backward_still_takes_part():
    model, optimizer = sgd(scalar_model())
    if hvd.rank() == 0:
        model(ones(6)).sum().backward()
    optimizer.step()
    assert model.weight.item() == -6 / hvd.size()
    assert_equal_on_all_ranks(model.parameters())


def test_accumulated_tail_of_an_epoch_is_averaged_over_what_it_holds():
    """Accumulate 2 over five micro-batches, two epochs: updates of 2, 2 and 1 micro-batches."""
    model, optimizer = sgd(scalar_model(), accumulate=2)
    for _ in range(2):
        for i, value in enumerate([1.0, 3.0, 5.0, 7.0, 9.0]):
            model(ones(value)).sum().backward()
            if i % 2 == 1 or i == 4:
                optimizer.step()
                optimizer.zero_grad()
    assert model.weight.item() == -2 * (2.0 + 6.0 + 9.0)


def test_backward_passes_per_step_adds_up_and_reduces_once():
    model = scalar_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0),
        named_parameters=model.named_parameters(),
        backward_passes_per_step=2,
    )
    model(ones(1)).sum().backward()
    assert model.weight.grad.item() == 1.0  # not reduced yet
    model(ones(hvd.rank())).sum().backward()
    optimizer.step()
    assert model.weight.item() == -(1 + mean_over_ranks(lambda r: r))
    if hvd.size() > 1:
        assert optimizer._reducer.wire.collectives == 1


def test_no_sync_leaves_the_decision_to_the_last_micro_batch():
    """Gradients 3 then 1 on rank 0, 3 then 4 on the others: the mean of the sums on all."""
    model, optimizer = sgd(scalar_model())
    with optimizer.no_sync():
        model(ones(3)).sum().backward()
    assert model.weight.grad.item() == 3.0
    second = 1.0 if hvd.rank() == 0 else 4.0
    model(ones(second)).sum().backward()
    assert model.weight.grad.item() == mean_over_ranks(lambda r: 3 + (1.0 if r == 0 else 4.0))
    optimizer.step()
    assert_equal_on_all_ranks(model.parameters())


def test_two_models_with_equal_parameter_names_are_kept_apart():
    first, first_optimizer = sgd(scalar_model())
    second, second_optimizer = sgd(scalar_model())
    (first(ones(hvd.rank())) + 10 * second(ones(hvd.rank()))).sum().backward()
    first_optimizer.step()
    second_optimizer.step()
    assert first.weight.item() == -mean_over_ranks(lambda r: r)
    assert second.weight.item() == -10 * mean_over_ranks(lambda r: r)


def test_several_groups_need_no_names():
    model = nn.Sequential(scalar_model(1.0), scalar_model(1.0))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([{"params": layer.parameters()} for layer in model], lr=1.0)
    )
    model(ones(hvd.rank())).sum().backward()
    optimizer.step()
    assert model[0].weight.item() == model[1].weight.item() == 1 - mean_over_ranks(lambda r: r)


def test_clipping_after_backward_sees_the_average():
    """Gradients 10 on rank 0 and 0 elsewhere: the average is clipped, not each rank's own."""
    model, optimizer = sgd(scalar_model())
    model(ones(10 if hvd.rank() == 0 else 0)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert norm.item() == pytest.approx(10 / hvd.size(), rel=1e-6)
    assert model.weight.item() == pytest.approx(-1.0, abs=1e-5)


def test_synchronize_clip_step_reduces_once():
    model, optimizer = sgd(scalar_model())
    model(ones(hvd.rank() + 1)).sum().backward()
    optimizer.synchronize()
    nn.utils.clip_grad_value_(model.parameters(), 0.25)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert model.weight.item() == -0.25
    if hvd.size() > 1:
        assert optimizer._reducer.wire.collectives == 1


def test_unequal_shards_average_over_samples():
    """Three samples x=1 on rank 0, one sample x=5 on each other rank, mean loss."""
    model, _ = sgd(scalar_model())
    x = ones(1, rows=3) if hvd.rank() == 0 else ones(5)
    (model(x).mean() * hvd.loss_scale(len(x))).backward()
    others = hvd.size() - 1
    assert model.weight.grad.item() == pytest.approx((3 * 1 + 5 * others) / (3 + others), rel=1e-6)


def test_unequal_token_counts_average_over_tokens():
    """10 tokens at loss 1 on rank 0, 100 at loss 3 elsewhere."""
    model, _ = sgd(scalar_model(1.0))
    tokens, loss = (10, 1.0) if hvd.rank() == 0 else (100, 3.0)
    value = model(ones(loss)).mean()
    (value * hvd.loss_scale(tokens)).backward()
    others = hvd.size() - 1
    expected = (10 * 1.0 + 300 * others) / (10 + 100 * others)
    assert model.weight.grad.item() == pytest.approx(expected, rel=1e-6)
    averaged = hvd.average_metrics({"loss": value.item()}, weight=tokens)
    assert averaged["loss"] == pytest.approx(expected, rel=1e-12)


def test_a_layer_unfrozen_later_is_reduced_from_its_first_step():
    model = nn.Sequential(scalar_model(1.0), scalar_model(1.0))
    model[0].requires_grad_(False)
    model, optimizer = sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(ones(hvd.rank() + 2)).sum().backward()
        model[0].requires_grad_(True)  # frozen in the first step, trained in the second
        optimizer.step()
    assert model[0].weight.item() != 1.0
    assert_equal_on_all_ranks(model.parameters())


def test_a_layer_frozen_later_stays_as_it_is():
    model = nn.Sequential(scalar_model(1.0), scalar_model(1.0))
    model, optimizer = sgd(model)
    model(ones()).sum().backward()
    optimizer.step()
    frozen_at = model[0].weight.item()
    model[0].requires_grad_(False)
    for _ in range(2):
        optimizer.zero_grad()
        model(ones(hvd.rank())).sum().backward()
        optimizer.step()
    assert model[0].weight.item() == frozen_at
    assert_equal_on_all_ranks(model.parameters())


def test_a_parameter_group_added_later_is_reduced():
    model = nn.Sequential(scalar_model(1.0), scalar_model(1.0))
    plain = torch.optim.SGD(model[0].parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain)
    optimizer.add_param_group({"params": list(model[1].parameters())})
    model(ones(hvd.rank())).sum().backward()
    optimizer.step()
    assert model[1].weight.item() == 1 - mean_over_ranks(lambda r: r)


def test_a_sparse_embedding_that_one_rank_does_not_use_is_summed_right():
    embedding = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(embedding.weight)
    other = scalar_model()
    model = nn.ModuleList([embedding, other])
    model, optimizer = sgd(model)
    for _ in range(2):  # the first step finds out, the second knows
        optimizer.zero_grad()
        out = other(ones()).sum()
        if hvd.rank() == 0:
            out = out + embedding(torch.tensor([1, 1, 3])).sum()
        out.backward()
        assert embedding.weight.grad.is_sparse
        optimizer.step()
    per_step = torch.tensor([[0.0] * 2, [2.0] * 2, [0.0] * 2, [1.0] * 2]) / hvd.size()
    torch.testing.assert_close(embedding.weight.detach(), -2 * per_step)
    assert_equal_on_all_ranks(model.parameters())


def test_sparse_as_dense_gives_the_same_sum():
    embedding = nn.Embedding(4, 2, sparse=True)
    nn.init.zeros_(embedding.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(embedding.parameters(), lr=1.0), sparse_as_dense=True
    )
    embedding(torch.tensor([hvd.rank() % 4])).sum().backward()
    optimizer.step()
    expected = torch.zeros(4, 2)
    for r in range(hvd.size()):
        expected[r % 4] -= 1 / hvd.size()
    torch.testing.assert_close(embedding.weight.detach(), expected)


def test_explicit_groups_travel_as_one_bucket_each():
    model = nn.Sequential(*(scalar_model(1.0) for _ in range(4)))
    parameters = list(model.parameters())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=1.0), groups=[parameters[:2], parameters[2:3]]
    )
    model(ones(hvd.rank())).sum().backward()
    assert [p.grad.item() for p in parameters] == [mean_over_ranks(lambda r: r)] * 4
    if hvd.size() > 1:
        assert optimizer._reducer.wire.collectives == 3


def test_sum_and_predivide_scale_as_asked():
    model = scalar_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
    model(ones(hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert model.weight.item() == -sum(r + 1 for r in range(hvd.size()))

    model = scalar_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), gradient_predivide_factor=2.0
    )
    model(ones(hvd.rank() + 1)).sum().backward()
    optimizer.step()
    assert model.weight.item() == pytest.approx(-mean_over_ranks(lambda r: r + 1), rel=1e-6)


def test_two_losses_in_two_backward_passes_give_the_gradient_of_their_sum():
    model, optimizer = sgd(scalar_model())
    model(ones(1)).sum().backward()
    model(ones(hvd.rank())).sum().backward()
    optimizer.step()
    assert model.weight.item() == -(1 + mean_over_ranks(lambda r: r))


def test_set_to_none_is_pytorchs_own():
    model, optimizer = sgd(scalar_model())
    for set_to_none in (True, False):
        model(ones()).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert (model.weight.grad is None) == set_to_none
    model(ones(hvd.rank())).sum().backward()
    assert model.weight.grad.item() == mean_over_ranks(lambda r: r)


def test_schedulers_built_before_or_after_wrapping_drive_the_same_rate():
    for build_first in (True, False):
        model = scalar_model()
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        if build_first:
            scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(plain)
        if not build_first:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            model(ones()).sum().backward()
            optimizer.step()
            scheduler.step()
        assert model.weight.item() == -1.5
        assert optimizer.param_groups[0]["lr"] == 0.25


def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all():
    model, optimizer = sgd(scalar_model())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    for step in range(3):
        optimizer.zero_grad()
        bad = step == 1 and hvd.rank() == 0
        x = ones(float("inf") if bad else 1.0)
        scaler.scale(model(x).sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0
    assert model.weight.item() == -2.0
    assert_equal_on_all_ranks(model.parameters())


def test_different_models_are_refused_on_every_rank():
    if hvd.size() == 1:
        pytest.skip("one rank cannot differ from itself")
    model = nn.Linear(2 if hvd.rank() == 0 else 3, 1)
    with pytest.raises(RankMismatch, match=r"parameter 0.*rank 0: .*\(1, 2\).*1.*: .*\(1, 3\)"):
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), named_parameters=model.named_parameters()
        )


def test_names_must_be_complete_and_unique():
    model = nn.Sequential(scalar_model(), scalar_model())
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ValueError, match=r"1 of the optimizer's parameters"):
        hvd.DistributedOptimizer(plain, named_parameters=model[0].named_parameters())
    doubled = [("w", p) for p in model.parameters()]
    with pytest.raises(ValueError, match=r"found twice: w"):
        hvd.DistributedOptimizer(plain, named_parameters=doubled)


def test_a_step_that_reduces_nothing_is_an_error():
    if hvd.size() == 1:
        pytest.skip("one rank has nothing to reduce")
    model = scalar_model().requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(HvdsyncError, match=r"none of the 1 parameters .* requires a gradient"):
        optimizer.step()


def test_several_optimizers_over_parts_of_one_model_share_a_backward():
    model = nn.Sequential(scalar_model(1.0), scalar_model(1.0))
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(layer.parameters(), lr=1.0), named_parameters=layer.named_parameters()
        )
        for layer in model
    ]
    model(ones(hvd.rank())).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    assert [layer.weight.item() for layer in model] == [1 - mean_over_ranks(lambda r: r)] * 2


def test_a_process_set_reduces_among_its_ranks_only():
    if hvd.size() == 1:
        pytest.skip("a set needs ranks outside it")
    inside = list(range(hvd.size() - 1))
    process_set = hvd.add_process_set(inside)
    model = scalar_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), process_set=process_set
    )
    model(ones(hvd.rank() + 1)).sum().backward()
    optimizer.step()
    if process_set.included():
        assert model.weight.item() == -sum(r + 1 for r in inside) / len(inside)
    else:
        assert model.weight.item() == -(hvd.rank() + 1)
    hvd.remove_process_set(process_set)


def test_ranks_that_ran_out_of_batches_join_with_zeros():
    model, optimizer = sgd(scalar_model())
    batches = 3 if hvd.rank() == 0 else 2
    for _ in range(batches):
        optimizer.zero_grad()
        model(ones(1)).sum().backward()
        optimizer.step()
    last = hvd.join()
    if hvd.size() > 1:
        assert last == 0
        assert optimizer._reducer.wire.collectives == batches
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert model.weight.item() == pytest.approx(-2 - 1 / hvd.size())


def test_reentrant_checkpointing_of_shared_weights_gives_the_whole_gradient():
    model, _ = sgd(scalar_model(1.0))

    def twice(x):
        first = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
        return torch.utils.checkpoint.checkpoint(model, first, use_reentrant=True)

    x = ones(2).requires_grad_()
    twice(x).sum().backward()
    # d(w * w * x)/dw = 2 w x, although the inner passes end before the outer one
    assert model.weight.grad.item() == 4.0
