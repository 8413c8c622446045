"""Horovod's operations on PyTorch tensors, as they are: what needs no mending passes through here.

Importing this finds Horovod, or says in one sentence how to get it. In a world that
``init(engine="ddp")`` started, the same names run over its process group.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from hvdsync.comm import horovod, process_group
from hvdsync.sync import host_sum

hvd = horovod.load("torch")

from horovod.torch import (  # noqa: E402
    Adasum,
    Average,
    HorovodInternalError,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    ccl_built,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    is_initialized,
    join,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    poll,
    reducescatter,
    reducescatter_async,
    remove_process_set,
    rocm_built,
    sparse_allreduce_async,
    start_timeline,
    stop_timeline,
    synchronize,
)

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "is_initialized",
    "join",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

# What does not depend on who carries tensors.
_FACTS = {name for name in __all__ if name.endswith("_built")} | {
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "global_process_set",
}


def _by_engine(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def run(*args: Any, **kwargs: Any) -> Any:
        if process_group.active() is None:
            return operation(*args, **kwargs)
        # Not before: it needs torch.distributed, which not every PyTorch was built with.
        other = importlib.import_module("hvdsync.torch.process_group_ops")
        return getattr(other, name)(*args, **kwargs)

    return run


# Ranks of one host reduce gradients without Horovod, which then is not all there is to join.
join = functools.wraps(join)(functools.partial(host_sum.join, join))
for _name in set(__all__) - _FACTS:
    globals()[_name] = _by_engine(_name, globals()[_name])
