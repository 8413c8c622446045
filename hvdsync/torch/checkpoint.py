"""``Checkpoint`` for PyTorch: objects with a ``state_dict`` in, ``.pt`` files out, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hvdsync.checkpoint import checkpoint, differences, randomness, torch_randomness
from hvdsync.checkpoint.codec import Codec
from hvdsync.comm import trees
from hvdsync.errors import CheckpointError
from hvdsync.torch.functions import broadcast_state

_ALIGNMENT = 64


class _StateDictCodec(Codec):
    def handles(self, obj: Any) -> bool:
        return hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")

    def snapshot(self, name: str, obj: Any) -> Any:
        skeleton, leaves = trees.split(obj.state_dict(), torch.is_tensor)
        return trees.join(skeleton, _copies(leaves))

    def view(self, name: str, obj: Any) -> Any:
        skeleton, leaves = trees.split(obj.state_dict(), torch.is_tensor)
        return trees.join(skeleton, [_on_host(leaf.detach()) for leaf in leaves])

    def write(self, folder: Path, name: str, snapshot: Any) -> None:
        path = folder / f"{name}.pt"
        # Through a Python file: while it waits for the disk, the others may run.
        with path.open("wb") as file:
            torch.save(snapshot, file)
        foreign = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if foreign:
            raise CheckpointError(
                f"the state of {name!r} holds {', '.join(sorted(foreign))}, which is neither a "
                "tensor nor a plain value; it could not be loaded again without running code "
                "from the file. Leave it out of state_dict()"
            )

    def read(self, folder: Path, name: str, obj: Any) -> Any:
        path = folder / f"{name}.pt"
        try:
            # weights_only: tensors and plain values; anything else is refused unrun.
            return torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{path} does not read as tensors and plain values: {error}"
            ) from error

    def check(self, obj: Any, tree: Any) -> None:
        if isinstance(obj, torch.nn.Module):
            found, expected = _shapes(tree), _shapes(obj.state_dict())
            if difference := differences.compare(found, expected):
                raise CheckpointError(f"it is of another model; {difference}")
        if isinstance(obj, torch.optim.Optimizer):
            stored, own = (
                [len(group["params"]) for group in state["param_groups"]]
                for state in (tree, obj.state_dict())
            )
            if stored != own:
                raise CheckpointError(
                    f"it is of another optimizer: found groups of {stored} parameters, expected "
                    f"{own}"
                )

    def apply(self, obj: Any, tree: Any) -> None:
        obj.load_state_dict(tree)

    def broadcast(self, tree: Any, name: str) -> Any:
        return broadcast_state(tree, 0, name)

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__}


class Checkpoint(checkpoint.Checkpoint):
    """Checkpoints of modules, optimizers, schedulers, scalers, samplers and plain values.

    ``<name>.pt`` of each object is its plain ``state_dict``: it opens with
    ``torch.load(path, weights_only=True)``, without hvdsync and without Horovod. Arguments are
    those of :class:`hvdsync.checkpoint.checkpoint.Checkpoint`.
    """

    @staticmethod
    def _make_codec() -> Codec:
        return _StateDictCodec()


class RandomState(randomness.RandomState):
    """The random streams of each rank: Python's, NumPy's global one, PyTorch's on CPU and GPU.

    Given to ``Checkpoint.save`` and ``restore`` under a name of its own it makes a resumed run
    draw the very numbers that the uninterrupted one would have drawn. ``generators`` are further
    ones: ``torch.Generator``, ``numpy.random.Generator``, ``random.Random``.
    """

    def __init__(self, *generators: Any) -> None:
        super().__init__(torch_randomness.streams, generators)


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in host memory of the same strides, made as fast as it goes."""
    layouts = [torch.empty_like(tensor, device="meta") for tensor in tensors]
    starts = np.cumsum([0, *(-(-t.nbytes // _ALIGNMENT) * _ALIGNMENT for t in layouts)])
    # One piece of NumPy's memory, which comes in huge pages: fresh small ones take longer to
    # get than the copy itself.
    arena = np.empty(int(starts[-1]), np.uint8)
    copies = []
    for tensor, layout, start in zip(tensors, layouts, starts, strict=False):
        memory = torch.from_numpy(arena[start : start + layout.nbytes]).view(layout.dtype)
        copy = memory.as_strided(layout.shape, layout.stride())
        copies.append(copy.copy_(tensor.detach()))
    return copies


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.cpu()
    # A slice would be written with all of the storage that it is a slice of.
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(value.shape)
        for name, value in state.items()
        if torch.is_tensor(value) and not is_lazy(value)
    }
