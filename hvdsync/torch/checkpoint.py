"""``Checkpoint`` for PyTorch: objects with a ``state_dict`` in, ``.pt`` files out, and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from hvdsync.checkpoint import checkpoint
from hvdsync.checkpoint.codec import Codec
from hvdsync.comm import trees
from hvdsync.torch.functions import broadcast_state


class _StateDictCodec(Codec):
    def handles(self, obj: Any) -> bool:
        return hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")

    def snapshot(self, name: str, obj: Any) -> Any:
        skeleton, leaves = trees.split(obj.state_dict(), torch.is_tensor)
        copies = [leaf.detach().to("cpu", copy=True) for leaf in leaves]
        return trees.join(skeleton, copies)

    def write(self, folder: Path, name: str, snapshot: Any) -> None:
        torch.save(snapshot, folder / f"{name}.pt")

    def read(self, folder: Path, name: str, obj: Any) -> Any:
        # weights_only: the file holds tensors and plain values; anything else is refused unrun.
        return torch.load(folder / f"{name}.pt", map_location="cpu", weights_only=True)

    def apply(self, obj: Any, tree: Any) -> None:
        obj.load_state_dict(tree)

    def broadcast(self, tree: Any, name: str) -> Any:
        return broadcast_state(tree, 0, name)


class Checkpoint(checkpoint.Checkpoint):
    """Checkpoints of modules, optimizers, schedulers, scalers, samplers and plain values.

    ``<name>.pt`` of each object is its plain ``state_dict``: it opens with
    ``torch.load(path, weights_only=True)``, without hvdsync and without Horovod.
    """

    def __init__(
        self, directory: str | os.PathLike[str], keep: int = 3, every: int | None = None
    ) -> None:
        super().__init__(directory, keep, every, codec=_StateDictCodec())
