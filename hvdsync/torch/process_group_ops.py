"""Horovod's operations on PyTorch tensors, over the process group of ``init(engine="ddp")``.

Names and arguments are Horovod's; ``process_set`` is a group of ``torch.distributed.new_group``.
A ``name`` has no use here: operations meet in the order in which they are called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.torch as horovod
import torch
import torch.distributed as dist

from hvdsync.comm import failures, process_group
from hvdsync.torch.compression import Compression

_REDUCTIONS = {
    horovod.Average: dist.ReduceOp.SUM,
    horovod.Sum: dist.ReduceOp.SUM,
    horovod.Min: dist.ReduceOp.MIN,
    horovod.Max: dist.ReduceOp.MAX,
    horovod.Product: dist.ReduceOp.PRODUCT,
}


class Handle:
    """An operation under way: what PyTorch calls works, and how their result is made."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any]) -> None:
        self._works = works
        self._finish: Callable[[], Any] | None = finish
        self._result: Any = None

    def done(self) -> bool:
        """Whether the result is there without waiting."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        """The result, when it is there."""
        if self._finish is not None:
            with failures.explained():
                for work in self._works:
                    work.wait()
            self._result, self._finish = self._finish(), None
        return self._result


def poll(handle: Handle) -> bool:
    return handle.done()


def synchronize(handle: Any) -> Any:
    return handle.wait() if isinstance(handle, Handle) else handle()


def is_initialized() -> bool:
    return True


def mpi_enabled() -> bool:
    return False


def mpi_threads_supported() -> bool:
    return False


def gloo_enabled() -> bool:
    return True


def barrier(process_set: Any = None) -> None:
    _communicator().barrier(process_set)


def _communicator() -> process_group.ProcessGroupCommunicator:
    communicator = process_group.active()
    assert communicator is not None  # else Horovod's own operation would run
    return communicator


def _group(process_set: Any) -> Any:
    return _communicator().group(process_set)


# All-reduce


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> Handle:
    op = _reduction(op, average)
    group = _group(process_set)
    _scale(tensor, prescale_factor)
    with failures.explained():
        work = dist.all_reduce(tensor, _REDUCTIONS[op], group, async_op=True)
    after = postscale_factor
    if op == horovod.Average:
        after /= dist.get_world_size(group)

    def finish() -> torch.Tensor:
        _scale(tensor, after)
        return tensor

    return Handle([work], finish)


def _reduction(op: Any, average: bool | None) -> Any:
    if op is None:
        op = horovod.Sum if average is False else horovod.Average
    elif average is not None:
        raise ValueError("give op= or average=, not both")
    if op not in _REDUCTIONS:
        raise ValueError("op=Adasum is Horovod's own; with engine='ddp' give Average or Sum")
    return op


def _scale(tensor: torch.Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.mul_(factor)
        else:
            tensor.copy_(tensor.double().mul_(factor))


def allreduce_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    return allreduce_async_(_copy(tensor), *args, **kwargs)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = allreduce_async_(tensor, *args, **kwargs).wait()
    return result


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = None,
) -> torch.Tensor:
    def run(value: torch.Tensor) -> torch.Tensor:
        wire, ctx = compression.compress(value)
        options = (average, name, op, prescale_factor, postscale_factor, process_set)
        return compression.decompress(allreduce_async(wire, *options).wait(), ctx)

    # The gradient of a sum of ranks' tensors is the sum of ranks' gradients; of an average, theirs.
    return _differentiable(tensor, run, run)


def grouped_allreduce_async_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Handle:
    return _all([allreduce_async_(tensor, *args, **kwargs) for tensor in tensors])


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Handle:
    return _all([allreduce_async(tensor, *args, **kwargs) for tensor in tensors])


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    result: list[torch.Tensor] = grouped_allreduce_async_(tensors, *args, **kwargs).wait()
    return result


def grouped_allreduce(
    tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    return [allreduce(tensor, *args, **kwargs) for tensor in tensors]


def _all(handles: Sequence[Handle]) -> Handle:
    works = [work for handle in handles for work in handle._works]
    return Handle(works, lambda: [handle.wait() for handle in handles])


# All-gather


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = None
) -> Handle:
    group = _group(process_set)
    lengths = _lengths(tensor, group)
    longest = max(lengths)
    rest = tensor.shape[1:]
    padded = tensor.new_zeros((longest, *rest))
    padded[: len(tensor)] = tensor.detach()
    gathered = tensor.new_empty((len(lengths), longest, *rest))
    works = []
    if gathered.numel():
        with failures.explained():
            parts = list(_bits(gathered).unbind())
            works = [dist.all_gather(parts, _bits(padded), group, async_op=True)]

    def finish() -> torch.Tensor:
        return torch.cat([row[:n] for row, n in zip(gathered, lengths, strict=True)])

    return Handle(works, finish)


def _lengths(tensor: torch.Tensor, group: Any) -> list[int]:
    if tensor.dim() == 0:
        raise ValueError("allgather concatenates along the first dimension; found a scalar")
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    with failures.explained():
        dist.all_gather(list(lengths.split(1)), torch.tensor([len(tensor)]), group)
    return lengths.tolist()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Where values are not added up, any dtype can travel that the runtime has no name for.
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    def back(gradient: torch.Tensor) -> torch.Tensor:
        group = _group(process_set)
        lengths = _lengths(tensor, group)
        start = sum(lengths[: dist.get_group_rank(group, _communicator().rank)])
        summed = allreduce(gradient, op=horovod.Sum, process_set=process_set)
        return summed[start : start + len(tensor)]

    return _differentiable(tensor, lambda t: allgather_async(t, name, process_set).wait(), back)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> Handle:
    return _all([allgather_async(tensor, name, process_set) for tensor in tensors])


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: Any = None
) -> list[torch.Tensor]:
    return [allgather(tensor, name, process_set) for tensor in tensors]


# Broadcast


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> Handle:
    with failures.explained():
        work = dist.broadcast(_bits(tensor.detach()), root_rank, _group(process_set), async_op=True)
    return Handle([work], lambda: tensor)


def broadcast_async(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Handle:
    return broadcast_async_(_copy(tensor), *args, **kwargs)


def broadcast_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    result: torch.Tensor = broadcast_async_(tensor, *args, **kwargs).wait()
    return result


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    def back(gradient: torch.Tensor) -> torch.Tensor:
        summed = allreduce(gradient, op=horovod.Sum, process_set=process_set)
        return summed if _communicator().rank == root_rank else torch.zeros_like(summed)

    return _differentiable(
        tensor, lambda t: broadcast_async(t, root_rank, name, process_set).wait(), back
    )


class _Differentiable(torch.autograd.Function):
    """An operation whose gradient is another one."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, run: Any, back: Any) -> Any:
        ctx.back = back
        return run(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return ctx.back(gradient.contiguous()), None, None


def _differentiable(
    tensor: torch.Tensor,
    run: Callable[[torch.Tensor], torch.Tensor],
    back: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    result: torch.Tensor = _Differentiable.apply(tensor, run, back)
    return result


# What a process group does otherwise, or not at all


def _refuse(name: str, advice: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError(f"{name}() is Horovod's own; with engine='ddp' {advice}")

    return refuse


_OWN = "torch.distributed has an operation of its own, in the group that init() made"
join = _refuse("join", 'use hvd.even_batches(batches, "pad"), which ends all ranks together')
add_process_set = _refuse("add_process_set", "use torch.distributed.new_group(ranks)")
remove_process_set = _refuse("remove_process_set", "use torch.distributed.destroy_process_group")
start_timeline = _refuse("start_timeline", "use torch.profiler")
stop_timeline = _refuse("stop_timeline", "use torch.profiler")
sparse_allreduce_async = _refuse("sparse_allreduce_async", "gather indices and values")
alltoall = alltoall_async = _refuse("alltoall", _OWN)
reducescatter = reducescatter_async = _refuse("reducescatter", _OWN)
grouped_reducescatter = grouped_reducescatter_async = _refuse("grouped_reducescatter", _OWN)
