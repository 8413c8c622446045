"""A process group of one process, and what is said of a runtime's errors."""

import pytest
import torch

import hvdsync.torch as hvd
from hvdsync.comm import failures, process_group
from hvdsync.errors import LaunchError, RankFailed, StalledRank


@pytest.fixture
def world():
    hvd.init(engine="ddp")
    yield
    hvd.shutdown()


def test_one_process_is_a_world_of_its_own(world):
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (0, 1, 0, 1)
    assert hvd.agree_all(True) and hvd.allgather_object("me") == ["me"]
    assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
    hvd.init(engine="ddp")  # again is no error, as with Horovod


def test_a_model_alone_trains_as_before(world):
    model, plain = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    plain.load_state_dict(model.state_dict())
    optimizer = torch.optim.Adam(plain.parameters())
    _, distributed = hvd.distribute(model, torch.optim.Adam(model.parameters()), bucket_cap_mb=2)
    for net, opt in ((model, distributed), (plain, optimizer)):
        net(torch.ones(3, 2)).sum().backward()
        opt.step()
    assert torch.equal(model.weight, plain.weight)


def test_shutdown_leaves_nothing_behind():
    hvd.init(engine="ddp")
    hvd.shutdown()
    assert not torch.distributed.is_initialized()
    assert process_group.active() is None


def test_engines_do_not_share_a_process(world):
    with pytest.raises(LaunchError, match=r"call shutdown\(\) first"):
        hvd.init()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"rank": 0, "size": 1}, "rank, size is for engine='ddp'"),
        ({"engine": "ddp", "process_sets": "dynamic"}, "process_sets is for engine='horovod'"),
        ({"engine": "nccl"}, "expected 'horovod' or 'ddp'"),
        ({"engine": "ddp", "backend": "mpi"}, "expected 'gloo' or 'nccl'"),
    ],
)
def test_arguments_of_the_other_engine_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        hvd.init(**arguments)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[gloo/unbound_buffer.cc:83] Timed out waiting 4000ms for recv operation", StalledRank),
        ("[gloo/pair.cc:553] Connection closed by peer [::1]:1. This is typical", RankFailed),
    ],
)
def test_an_error_of_a_lost_rank_is_said_in_terms_of_ranks(text, kind, world):
    with pytest.raises(kind, match="rank 0 of 1"), failures.explained():
        raise RuntimeError(text)


def test_another_error_comes_out_as_it_is(world):
    with pytest.raises(RuntimeError, match="shapes") as caught, failures.explained():
        raise RuntimeError("shapes differ")
    assert type(caught.value) is RuntimeError
