"""What ranks must share is compared before they depend on it; a difference is an error at once."""

import pytest
import torch

import hvdsync.torch as hvd
from hvdsync.comm import comparison, world
from hvdsync.comm.comparison import note, noted, require_equal
from hvdsync.errors import RankMismatch


class Counting:
    """The world, with the bytes that this rank gave to all-gathers."""

    def __init__(self, inner):
        self.inner = inner
        self.gathered = 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def allgather(self, array, *args, **kwargs):
        self.gathered += array.nbytes
        return self.inner.allgather(array, *args, **kwargs)


def test_equal_facts_cost_sixteen_bytes_a_rank(monkeypatch):
    counting = Counting(world.current())
    monkeypatch.setattr(world, "_active", counting)
    require_equal("things", {"many": list(range(1000)), "text": "x" * 1000}, "Do so")
    assert counting.gathered == (16 if hvd.size() > 1 else 0)


@pytest.mark.usefixtures("several_ranks")
def test_the_first_fact_that_differs_is_named_with_the_values_of_all_ranks():
    last = hvd.size() - 1
    facts = {"equal": 1, "count": 7 + (hvd.rank() == last), "other": hvd.rank()}
    others = ", ".join(str(rank) for rank in range(last))
    with pytest.raises(RankMismatch) as caught:
        require_equal("things", facts, "Count again", labels={"count": "of them"})
    assert str(caught.value) == (
        f"rank {hvd.rank()} of {hvd.size()}: things differ between ranks in count (and 1 more): "
        f"rank{'s' if last > 1 else ''} {others}: of them 7; rank {last}: of them 8; "
        "expected the same on every rank. Count again"
    )


@pytest.mark.usefixtures("several_ranks")
def test_a_fact_that_a_rank_lacks_differs():
    facts = {"a": 1, "b": 2} if hvd.rank() == 0 else {"a": 1}
    with pytest.raises(RankMismatch, match=r"in b: rank 0: 2; ranks? 1.*: none"):
        require_equal("things", facts, "Do so")


@pytest.mark.usefixtures("several_ranks")
@pytest.mark.parametrize(
    ("option", "on_rank_0", "elsewhere"),
    [
        ("backward_passes_per_step", 1, 2),
        ("groups", 1, 2),
        ("gradient_predivide_factor", 1.0, 2.0),
        ("sparse_as_dense", False, True),
        ("compression", hvd.Compression.none, hvd.Compression.fp16),
    ],
)
def test_other_options_on_a_rank_are_refused(option, on_rank_0, elsewhere):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = on_rank_0 if hvd.rank() == 0 else elsewhere
    shown = ["NoneCompressor", "float16"] if option == "compression" else [on_rank_0, elsewhere]
    with pytest.raises(RankMismatch, match=rf"{option}: rank 0: {shown[0]}; .*: {shown[1]}"):
        hvd.DistributedOptimizer(optimizer, **{option: chosen})


@pytest.mark.usefixtures("several_ranks")
def test_another_optimizer_or_number_of_parameters_on_a_rank_is_refused():
    model = torch.nn.Linear(2, 1, bias=hvd.rank() == 0)
    with pytest.raises(RankMismatch, match=r"number of parameters.*rank 0: 2; .*: 1"):
        hvd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model = torch.nn.Linear(2, 1)
    kind = torch.optim.SGD if hvd.rank() == 0 else torch.optim.Adam
    with pytest.raises(RankMismatch, match=r"class: rank 0: SGD; .*: Adam"):
        hvd.distribute(model, kind(model.parameters(), lr=0.1))


@pytest.mark.usefixtures("several_ranks")
def test_another_seed_of_the_data_order_on_a_rank_is_refused():
    noted()
    hvd.DistributedSampler(10, seed=3)
    hvd.DistributedSampler(12, seed=hvd.rank())
    # Evaluation on one rank alone is nobody else's business.
    if hvd.rank() == 0:
        hvd.DistributedSampler(11, shuffle=False)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(RankMismatch, match=r"data order: rank 0: 10 by seed 3, 12 by seed 0; rank"):
        hvd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert noted() == {}


def test_what_is_noted_is_kept_once_and_given_once():
    noted()
    for value in (1, 2, 1):
        note("number", value)
    assert noted() == {"number": "1, 2"}
    assert noted() == {}


@pytest.mark.usefixtures("several_ranks")
def test_other_versions_on_a_rank_are_refused():
    ours = comparison.installation("torch")
    plain = torch.__version__.split("+")[0]
    assert f"torch {plain}" in ours
    noted()
    found = ours.replace(f"torch {plain}", "torch 1.0") if hvd.rank() == 1 else ours
    note("installed versions", found)
    model = torch.nn.Linear(2, 1)
    with pytest.raises(RankMismatch, match=rf"versions: .*{plain}.*; rank 1: .*torch 1\.0,"):
        hvd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
