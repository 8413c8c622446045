"""The contenders of ``bench step`` in PyTorch: a model's name in, a training step of each out."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvdsync.torch as hvd
from hvdsync.comm import horovod
from hvdsync.tools.bench import torch_models
from hvdsync.tools.bench.contenders import COMMUNICATION, COMPUTE, HVDSYNC, RAW, Contender

BUCKETS_MB = (1, 4, 25)


def start() -> None:
    """Start Horovod and, beside it, the process group that DDP needs."""
    hvd.init()
    if hvd.size() == 1:
        return
    store, address = None, None
    if hvd.rank() == 0:
        one_host = hvd.local_size() == hvd.size()
        host = "127.0.0.1" if one_host else socket.gethostname()
        store = dist.TCPStore(host, 0, hvd.size(), is_master=True, wait_for_workers=False)
        address = (host, store.port)
    host, port = hvd.broadcast_object(address, 0)
    if store is None:
        store = dist.TCPStore(host, port, hvd.size(), is_master=False)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())


def stop() -> None:
    """End both; whoever wraps a model in DDP has dropped it (see ``hvdsync.torch.ddp.let_go``)."""
    if dist.is_initialized():
        dist.destroy_process_group()
    hvd.shutdown()


@contextmanager
def contenders(name: str, lr: float) -> Iterator[dict[str, Contender]]:
    """By name, each with a model of its own and all from the same weights."""
    batch = torch_models.batch_for(name, seed=hvd.rank())
    made = {COMPUTE: _plain(name, batch, lr)}
    made |= _hvdsync(name, batch, lr)
    if hvd.size() > 1:
        made[RAW] = _raw(name, batch, lr)
        for megabytes in BUCKETS_MB:
            made[f"DDP, {megabytes} MB buckets"] = _ddp(name, batch, lr, megabytes)
    yield made
    made.clear()  # before the process group ends


def _sgd(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def _plain(name: str, batch: torch_models.Batch, lr: float) -> Contender:
    model = torch_models.make(name)
    return Contender(torch_models.training_step(model, _sgd(model, lr), batch))


def _hvdsync(name: str, batch: torch_models.Batch, lr: float) -> dict[str, Contender]:
    """The training step, and the reduction of its gradients with nothing beside it."""
    model = torch_models.make(name)
    model, optimizer = hvd.distribute(model, _sgd(model, lr))
    step = torch_models.training_step(model, optimizer, batch)

    def traffic() -> tuple[int, int]:
        return optimizer.sent_bytes, optimizer.collectives

    made = {HVDSYNC: Contender(step, traffic)}
    if hvd.size() > 1:
        # The reducer's own: for everyone else the gradients of a step are reduced once.
        made[COMMUNICATION] = Contender(optimizer._reducer.flush)
    return made


def _raw(name: str, batch: torch_models.Batch, lr: float) -> Contender:
    raw: Any = horovod.load("torch")
    model = torch_models.make(name)
    optimizer = raw.DistributedOptimizer(_sgd(model, lr), model.named_parameters())
    return Contender(torch_models.training_step(model, optimizer, batch))


def _ddp(name: str, batch: torch_models.Batch, lr: float, megabytes: int) -> Contender:
    model = torch_models.make(name)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=megabytes, gradient_as_bucket_view=True)
    return Contender(torch_models.training_step(wrapped, _sgd(model, lr), batch))
