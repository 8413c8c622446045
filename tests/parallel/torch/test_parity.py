"""N ranks on shards of a batch train to the weights of one plain process on the whole batch.

Models are in float64: the only difference is the order of sums, a few units in the last place
(1e-16) a step, so that 1e-10 after a handful of steps is generous and still catches any real error.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hvdsync.torch as hvd
from tests.parallel.ranks import shard
from tests.parallel.torch.helpers import assert_equal_on_all_ranks, plain_copy

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}
STEPS = 6
SAMPLES = 12  # divides by 1, 2, 3 and 4 ranks


def mlp():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.norm = hvd.SyncBatchNorm(4)
        self.head = nn.Linear(4 * 9, 3)

    def forward(self, x):
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


class TiedNet(nn.Module):
    """Encoder and decoder share one matrix."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.second(torch.tanh(self.first(x))))


class PartlyFrozenNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(5, 8)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.frozen(x)))


class PartlyUnusedNet(nn.Module):
    """``spare`` is never used; weight decay must not touch it, as in one process."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.spare = nn.Linear(5, 3)

    def forward(self, x):
        return self.used(x)


def batches(*, images=False):
    generator = torch.Generator().manual_seed(1)
    shape = (SAMPLES, 1, 5, 5) if images else (SAMPLES, 5)
    for _ in range(STEPS):
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (SAMPLES,), generator=generator)
        yield x, y


def train(model, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def assert_parity(model, make_optimizer, images=False):
    model = model.double()
    reference = plain_copy(model)
    whole = list(batches(images=images))
    if images:  # the plain process's batch norm sees the whole batch anyway
        reference.norm = nn.BatchNorm2d(4).double()
    train(reference, make_optimizer(reference), whole)

    model, optimizer = hvd.distribute(model, make_optimizer(model))
    train(model, optimizer, [shard(*batch) for batch in whole])

    for (name, found), expected in zip(
        model.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        if hvd.size() == 1:
            assert torch.equal(found, expected), name
        else:
            torch.testing.assert_close(found, expected, **TOLERANCE, msg=name)
    assert_equal_on_all_ranks(model.state_dict().values())


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01),
    "muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=0.02),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_reaches_the_weights_of_one_process(name):
    assert_parity(mlp(), OPTIMIZERS[name])


@pytest.mark.parametrize("make_model", [TiedNet, PartlyFrozenNet, PartlyUnusedNet])
def test_unusual_models_reach_the_weights_of_one_process(make_model):
    assert_parity(make_model(), OPTIMIZERS["sgd"])


def test_batch_norm_over_all_ranks_reaches_the_weights_and_buffers_of_one_process():
    assert_parity(ConvNet(), OPTIMIZERS["sgd"], images=True)


def test_lbfgs_with_a_closure_reaches_the_weights_of_one_process():
    model = mlp().double()
    reference = plain_copy(model)
    (x, y), *_ = batches()
    x_mine, y_mine = shard(x, y)

    def fit(model, optimizer, x, y):
        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    def lbfgs(model):
        return torch.optim.LBFGS(
            model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
        )

    fit(reference, lbfgs(reference), x, y)
    model, optimizer = hvd.distribute(model, lbfgs(model))
    fit(model, optimizer, x_mine, y_mine)
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        # A line search divides small differences by one another: looser than plain steps.
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    assert_equal_on_all_ranks(model.parameters())


def test_sparse_embeddings_reach_the_weights_of_one_process():
    model = nn.Sequential(nn.Embedding(20, 4, sparse=True)).double()
    reference = plain_copy(model)
    generator = torch.Generator().manual_seed(2)
    tokens = [torch.randint(20, (SAMPLES,), generator=generator) for _ in range(STEPS)]

    def fit(model, optimizer, data):
        for batch in data:
            optimizer.zero_grad()
            (model(batch) ** 2).sum(1).mean().backward()
            assert model[0].weight.grad.is_sparse
            optimizer.step()

    fit(reference, torch.optim.SparseAdam(reference.parameters(), lr=0.1), tokens)
    model, optimizer = hvd.distribute(model, torch.optim.SparseAdam(model.parameters(), lr=0.1))
    fit(model, optimizer, [shard(batch)[0] for batch in tokens])
    torch.testing.assert_close(model[0].weight, reference[0].weight, **TOLERANCE)
    assert_equal_on_all_ranks(model.parameters())


def test_compiled_model_reaches_the_weights_of_one_process():
    assert_parity_of_compiled(mlp().double())


def assert_parity_of_compiled(model):
    reference = plain_copy(model)
    whole = list(batches())
    train(reference, OPTIMIZERS["sgd"](reference), whole)
    # aot_eager: traced and split like any compiled model, without a compiler run.
    compiled = torch.compile(model, backend="aot_eager")
    _, optimizer = hvd.distribute(model, OPTIMIZERS["sgd"](model))
    train(compiled, optimizer, [shard(*batch) for batch in whole])
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCE)
    assert_equal_on_all_ranks(model.parameters())


def test_channels_last_model_reaches_the_weights_of_one_process():
    model = ConvNet().to(memory_format=torch.channels_last)
    assert_parity(model, OPTIMIZERS["sgd"], images=True)


def test_fp16_compression_stays_close_and_keeps_ranks_equal():
    model = mlp()
    reference = plain_copy(model)
    whole = [(x.float(), y) for x, y in batches()]
    train(reference, OPTIMIZERS["sgd"](reference), whole)
    model, optimizer = hvd.distribute(
        model, OPTIMIZERS["sgd"](model), compression=hvd.Compression.fp16
    )
    train(model, optimizer, [shard(*batch) for batch in whole])
    for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
        # Half precision keeps 11 bits: 5e-4 relative on each gradient.
        torch.testing.assert_close(found, expected, rtol=5e-3, atol=5e-3)
    assert_equal_on_all_ranks(model.parameters())


def test_bfloat16_parameters_are_reduced():
    model = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    nn.init.zeros_(model.weight)
    model, optimizer = hvd.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = torch.full((1, 4), float(hvd.rank()), dtype=torch.bfloat16)
    model(x).sum().backward()
    optimizer.step()
    mean_rank = (hvd.size() - 1) / 2
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.tolist() == [[-mean_rank] * 4]
