"""The PyTorch front door: ``import hvdsync.torch as hvd`` in place of ``horovod.torch``.

Horovod's names, mended for today's PyTorch, and the verbs that all front doors share.
"""

import atexit
import sys
from typing import Any, Literal

from hvdsync.checkpoint.preemption import Preemption
from hvdsync.comm import process_group, runtime_threads
from hvdsync.comm.verbs import *
from hvdsync.data.sampler import DistributedSampler
from hvdsync.errors import LaunchError
from hvdsync.guard.stragglers import Stragglers
from hvdsync.guard.watch import limit, watch
from hvdsync.sync.compression.memory import ErrorFeedback
from hvdsync.sync.schedule import scale_learning_rate, warmup
from hvdsync.sync.update_rules import Asynchronous, DiLoCo, LocalSGD, Synchronous
from hvdsync.torch import elastic
from hvdsync.torch.checkpoint import Checkpoint, RandomState
from hvdsync.torch.compression import Compression
from hvdsync.torch.distribute import distribute
from hvdsync.torch.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdsync.torch.guard import Guard, check_replicas
from hvdsync.torch.ops import *
from hvdsync.torch.optimizer import DistributedOptimizer
from hvdsync.torch.probe import CorruptionProbe
from hvdsync.torch.sync_batch_norm import SyncBatchNorm
from hvdsync.torch.uneven import even_batches


def init(
    *args: Any,
    wait_limit: float | None = None,
    engine: Literal["horovod", "ddp"] = "horovod",
    rank: int | None = None,
    size: int | None = None,
    master_address: str | None = None,
    master_port: int | None = None,
    backend: Literal["gloo", "nccl"] | None = None,
    **kwargs: Any,
) -> None:
    """Start Horovod for PyTorch; other arguments are those of Horovod's ``init`` (``comm``,
    ``process_sets``). With no launcher it starts a world of one.

    With ``engine="ddp"`` it starts a process group of ``torch.distributed`` in its place, under
    ``horovodrun``, ``mpirun``, ``torchrun`` or ``srun`` (which needs MASTER_ADDR and MASTER_PORT).
    A process that its own parent started, by ``torch.multiprocessing.spawn`` for instance, gives
    ``rank``, ``size``, ``master_address`` and ``master_port``: rank 0 listens there.
    ``backend`` is "nccl" where there are GPUs, otherwise "gloo"; what is on the host travels over
    Gloo with both. Every verb works the same; sets of ranks are groups that
    ``torch.distributed.new_group`` made.

    No collective waits longer than ``wait_limit`` seconds for a rank: every rank then logs which
    tensors wait for whom, and where each rank is, and raises ``StalledRank``; with "ddp" it only
    raises. The limit of rank 0 counts; it defaults to the variable HVDSYNC_WAIT_LIMIT, then to 600;
    0 is none.

    Raises ``LaunchError`` when the launcher started more ranks than Horovod sees, and when the
    ranks of a process group do not find one another.
    """
    place = {
        "rank": rank,
        "size": size,
        "master_address": master_address,
        "master_port": master_port,
        "backend": backend,
    }
    if engine == "horovod":
        if given := [name for name, value in place.items() if value is not None]:
            raise ValueError(f"init: {', '.join(given)} is for engine='ddp'; found {engine!r}")
        if process_group.active() is not None:
            raise LaunchError("init: this process runs engine='ddp'; call shutdown() first")
        watch.start("torch", *args, wait_limit=wait_limit, **kwargs)
    elif engine == "ddp":
        if args or kwargs:
            raise ValueError(
                f"init: {', '.join([*map(repr, args), *kwargs])} is for engine='horovod'"
            )
        process_group.start(wait_limit=limit.resolve(wait_limit), **place)  # type: ignore[arg-type]
        atexit.register(_leave)
    else:
        raise ValueError(f"init: engine is {engine!r}; expected 'horovod' or 'ddp'")


def shutdown() -> None:
    """Stop the engine; afterwards this process is a world of one until the next ``init``."""
    if process_group.active() is not None:
        _end_process_group()
    else:
        watch.stop("torch")


def _end_process_group() -> None:
    from hvdsync.torch import ddp

    atexit.unregister(_leave)
    runtime_threads.settle()
    ddp.let_go()
    process_group.stop()


def _leave() -> None:
    """End the process group of a script that did not, before the interpreter goes.

    Later its thread, which frees tensors of the last collective, would abort the process. A rank
    that fails may be in the midst of a collective, and does not wait for that.
    """
    if process_group.active() is not None and getattr(sys, "last_value", None) is None:
        _end_process_group()
