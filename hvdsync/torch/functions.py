"""Model and optimizer state from one rank to all, bit for bit, without touching it on the root.

Tensors of any dtype, order and device go in; every rank leaves with the root's values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from hvdsync.comm import trees, verbs, world


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """A flat view of a dense tensor's memory on the host; bits, so that any dtype can travel."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def broadcast_parameters(params: Any, root_rank: int = 0) -> None:
    """Overwrite tensors on every rank with those of ``root_rank`` (stands for Horovod's).

    Arguments:
        params: ``model.state_dict()``, or a list of tensors or of (name, tensor) pairs, such as
            ``list(model.named_parameters())``. Every rank gives the same names and shapes.
        root_rank: the rank that has the values.

    On the wire: the tensors' bytes, in chunks of 64 MiB. Raises ``ValueError`` for another kind
    of argument.
    """
    if isinstance(params, Mapping):
        pairs: list[tuple[Any, Any]] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, str | bytes | torch.Tensor):
        pairs = [p if isinstance(p, tuple) else (None, p) for p in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    if world.current().size == 1:
        return
    tensors = [p.detach() for _, p in pairs if isinstance(p, torch.Tensor)]
    # A tensor that is not one run of host memory travels through a copy that is.
    copies = [t if t.is_contiguous() and t.device.type == "cpu" else None for t in tensors]
    staged = [
        t.cpu().contiguous() if copy is None else copy
        for t, copy in zip(tensors, copies, strict=True)
    ]
    trees.broadcast_buffers([_bytes_of(t) for t in staged], root_rank, "hvdsync.parameters")
    with torch.no_grad():
        for tensor, copy in zip(tensors, staged, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the optimizer state and options of ``root_rank`` (stands for Horovod's).

    Works for any optimizer, fresh or restored on the root alone: learning rate, betas, step
    counts and per-parameter tensors all become the root's. No optimizer step is taken, and the
    root's own state is not written to. ``model`` is accepted for scripts written for Horovod.

    On the wire: the state dict's skeleton pickled, its tensors as bytes.
    """
    if world.current().size == 1:
        return
    state = broadcast_state(optimizer.state_dict(), root_rank, "hvdsync.optimizer_state")
    if verbs.rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_state(state: Any, root_rank: int, name: str) -> Any:
    """A nested state with tensor leaves from ``root_rank``, on every rank; leaves arrive on CPU."""
    # Same storage on the root: a tensor on a GPU or with holes is copied once, for its bytes.
    if verbs.rank() == root_rank:
        skeleton, leaves = trees.split(state, torch.is_tensor)
        state = trees.join(skeleton, [t.detach().cpu().contiguous() for t in leaves])
    return trees.broadcast_tree(
        state,
        is_leaf=torch.is_tensor,
        describe=lambda t: (tuple(t.shape), t.dtype),
        allocate=lambda d: torch.empty(d[0], dtype=d[1]),
        as_bytes=_bytes_of,
        root=root_rank,
        name=name,
    )


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None
) -> Any:
    """The object of rank ``root_rank``, on every rank; pickled (stands for Horovod's)."""
    return verbs.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """The objects of all ranks in rank order; pickled (stands for Horovod's)."""
    return verbs.allgather_object(obj, name)
