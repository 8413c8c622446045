"""Horovod's operations over a process group: values, gradients, dtypes, and the verbs' rank."""

import os

import pytest
import torch
import torch.distributed as dist

import hvdsync.torch as hvd
from hvdsync.comm.launch import detect

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int32, torch.int64]


def of(rank, dtype=torch.float32):
    return torch.arange(1, 7).reshape(2, 3).to(dtype) * (rank + 1)


def everyone(dtype=torch.float32):
    return torch.stack([of(rank, dtype) for rank in range(hvd.size())])


def test_the_world_is_the_launchers():
    launch = detect()
    found = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    if launch is not None:
        assert found == (launch.rank, launch.size, launch.local_rank, launch.local_size)
    assert (dist.get_rank(), dist.get_world_size()) == found[:2]
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_initialized() and not hvd.mpi_enabled()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_allreduce_averages(dtype):
    mine = of(hvd.rank(), dtype)
    found = hvd.allreduce(mine)
    torch.testing.assert_close(found, everyone().mean(0).to(dtype))
    assert torch.equal(mine, of(hvd.rank(), dtype))


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_allreduce_sums_and_compares_integers(dtype):
    mine = of(hvd.rank(), dtype)
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), everyone(dtype).sum(0).to(dtype))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Max), everyone(dtype).amax(0))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Min), of(0, dtype))


def test_allreduce_scales_before_and_after():
    found = hvd.allreduce(of(hvd.rank()), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    torch.testing.assert_close(found, everyone().sum(0) * 2)


def test_allreduce_in_place_grouped_and_asynchronous():
    mine = of(hvd.rank())
    assert hvd.allreduce_(mine) is mine
    torch.testing.assert_close(mine, everyone().mean(0))
    pair = hvd.grouped_allreduce([of(hvd.rank()), of(hvd.rank()) + 1], op=hvd.Sum)
    torch.testing.assert_close(pair[1], (everyone() + 1).sum(0))
    handle = hvd.allreduce_async(of(hvd.rank()), op=hvd.Sum)
    torch.testing.assert_close(hvd.synchronize(handle), everyone().sum(0))
    assert hvd.poll(handle)
    handle = hvd.grouped_allreduce_async_([mine], op=hvd.Sum)
    torch.testing.assert_close(hvd.synchronize(handle)[0], everyone().mean(0) * hvd.size())


def test_allreduce_is_differentiable():
    mine = of(hvd.rank()).requires_grad_()
    (hvd.allreduce(mine, op=hvd.Sum) * (hvd.rank() + 1)).sum().backward()
    factor = sum(rank + 1 for rank in range(hvd.size()))
    assert torch.equal(mine.grad, torch.full((2, 3), float(factor)))


def test_allgather_takes_different_lengths_and_is_differentiable():
    mine = torch.full((hvd.rank() + 1, 2), float(hvd.rank()), requires_grad=True)
    found = hvd.allgather(mine)
    rows = [float(rank) for rank in range(hvd.size()) for _ in range(rank + 1)]
    assert found[:, 0].tolist() == rows
    (found * torch.arange(len(rows))[:, None]).sum().backward()
    start = sum(range(hvd.rank() + 1))
    expected = hvd.size() * torch.arange(start, start + hvd.rank() + 1.0)
    assert torch.equal(mine.grad, expected[:, None].expand(-1, 2))


def test_allgather_where_only_the_last_rank_has_rows():
    count = 2 if hvd.rank() == hvd.size() - 1 else 0
    assert hvd.allgather(torch.ones(count, 3, dtype=torch.bool)).tolist() == [[True] * 3] * 2
    assert hvd.allgather(torch.ones(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_broadcast_gives_the_roots(dtype):
    root = hvd.size() - 1
    assert torch.equal(hvd.broadcast(of(hvd.rank(), dtype), root), of(root, dtype))
    mine = of(hvd.rank(), dtype)
    assert hvd.broadcast_(mine, root) is mine
    assert torch.equal(mine, of(root, dtype))


def test_broadcast_is_differentiable():
    mine = of(hvd.rank()).requires_grad_()
    hvd.broadcast(mine, 0).sum().backward()
    expected = float(hvd.size()) if hvd.rank() == 0 else 0.0
    assert torch.equal(mine.grad, torch.full((2, 3), expected))


def test_a_group_of_pytorch_is_a_part_of_the_ranks(several_ranks):
    group = dist.new_group([0])
    if hvd.rank() == 0:
        assert torch.equal(hvd.allreduce(of(0), process_set=group), of(0))
        assert hvd.broadcast_object("told", process_set=group) == "told"
    assert hvd.broadcast_object(hvd.rank(), root_rank=hvd.size() - 1) == hvd.size() - 1
    hvd.barrier()


def test_a_process_set_is_refused(several_ranks):
    with pytest.raises(ValueError, match=r"torch\.distributed\.new_group"):
        hvd.allreduce(of(0), process_set=hvd.ProcessSet([0]))
    with pytest.raises(ValueError, match="Adasum is Horovod's own"):
        hvd.allreduce(of(0), op=hvd.Adasum)


def test_the_environment_is_left_as_it_was():
    assert "GLOO_SOCKET_IFNAME" not in os.environ
