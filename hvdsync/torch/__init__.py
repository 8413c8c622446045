"""The PyTorch front door: ``import hvdsync.torch as hvd`` in place of ``horovod.torch``.

Horovod's names, mended for today's PyTorch, and the verbs that all front doors share.
"""

from typing import Any

from hvdsync.checkpoint.preemption import Preemption
from hvdsync.comm.verbs import *
from hvdsync.data.sampler import DistributedSampler
from hvdsync.guard.stragglers import Stragglers
from hvdsync.guard.watch import watch
from hvdsync.sync.schedule import scale_learning_rate, warmup
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
from hvdsync.torch.sync_batch_norm import SyncBatchNorm
from hvdsync.torch.uneven import even_batches


def init(*args: Any, wait_limit: float | None = None, **kwargs: Any) -> None:
    """Start Horovod for PyTorch; other arguments are those of Horovod's ``init`` (``comm``,
    ``process_sets``). With no launcher it starts a world of one.

    No collective waits longer than ``wait_limit`` seconds for a rank: every rank then logs which
    tensors wait for whom, and where each rank is, and raises ``StalledRank``. The limit of rank 0
    counts; it defaults to the variable HVDSYNC_WAIT_LIMIT, then to 600; 0 is none.

    Raises ``LaunchError`` when the launcher started more ranks than Horovod sees.
    """
    watch.start("torch", *args, wait_limit=wait_limit, **kwargs)


def shutdown() -> None:
    """Stop Horovod; afterwards this process is a world of one until the next ``init``."""
    watch.stop("torch")
