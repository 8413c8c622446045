"""``CorruptionProbe`` for PyTorch: a module and a batch in, the ranks that compute wrongly out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hvdsync.comm import trees
from hvdsync.guard import probe
from hvdsync.guard.fingerprints import Entry
from hvdsync.torch.guard import numbers_of, tensor_entry


class CorruptionProbe(probe.CorruptionProbe):
    __doc__ = probe.CorruptionProbe.__doc__

    def check(self, model: torch.nn.Module, batch: Any) -> tuple[int, ...]:
        """To be called once per step, on every rank, between steps; the ranks found to be wrong.

        ``batch`` is this rank's micro-batch as ``loss`` takes it: tensors, in lists, tuples and
        dicts. Collective at every ``every``-th call: two batches travel, and a digest of 16 bytes
        for each result; gradients only where digests differ. Raises :class:`SilentCorruption` and
        :class:`ReplicaMismatch` on every rank. With the engine "ddp", call it inside the
        optimizer's ``no_sync()``.
        """
        return self._check(_TorchModel(self.loss, model), batch)


class _TorchModel:
    """See :class:`hvdsync.guard.probe.Backend`."""

    def __init__(self, loss: Callable[[Any, Any], Any], model: torch.nn.Module) -> None:
        self._loss = loss
        self._model = model

    def portable(self, batch: Any) -> Any:
        return _map_tensors(lambda tensor: tensor.detach().cpu(), batch)

    def state(self) -> dict[str, torch.Tensor]:
        return {name: b.detach().cpu().clone() for name, b in self._model.named_buffers()}

    def parameters(self) -> list[Entry]:
        return [tensor_entry(name, p) for name, p in self._model.named_parameters()]

    def put(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, buffer in self._model.named_buffers():
                buffer.copy_(state[name])

    def gradients(self, batch: Any, seed: int) -> list[tuple[str, Any]]:
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        device = named[0][1].device
        batch = _map_tensors(lambda tensor: tensor.to(device), batch)
        with _seeded(seed, device), torch.enable_grad():
            loss = self._loss(self._model, batch)
            # Leaves every .grad as it is, and the hooks on it out.
            found = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        nothing = torch.empty(0)
        return [
            (name, numbers_of(nothing if gradient is None else gradient))
            for (name, _), gradient in zip(named, found, strict=True)
        ]


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    skeleton, leaves = trees.split(batch, torch.is_tensor)
    return trees.join(skeleton, [function(leaf) for leaf in leaves])
