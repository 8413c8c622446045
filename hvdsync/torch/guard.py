"""``check_replicas`` and ``Guard`` for PyTorch: modules and optimizers in, a verdict out.

Lists their state under the names of ``state_dict`` and spreads it from one rank in a repair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hvdsync.guard import guard, replicas
from hvdsync.guard.fingerprints import Entry, flatten, kind_of, plain_entry, without
from hvdsync.sync.variables import refuse_different
from hvdsync.torch.distribute import broadcast_model
from hvdsync.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from hvdsync.torch.hooks import ForwardHook

_PLAIN = (bool, int, float, str, type(None))


def check_replicas(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scaler: Any = None,
    ignore: Sequence[str] = (),
) -> None:
    """Compare the state of all ranks, bit for bit; collective.

    Arguments:
        model: parameters and buffers, as ``model.state_dict()`` lists them.
        optimizer: plain or distributed; its tensors and step counts of each parameter, and the
            options of its groups, the learning rate among them.
        scaler: a ``torch.amp.GradScaler``: its scale and what it counts.
        ignore: shell patterns of names that are not compared, such as ``"*running_*"``.

    On the wire: 17 bytes a rank while replicas are equal. Raises :class:`ReplicaMismatch` on every
    rank, naming the first tensor that differs, the ranks that differ from the majority, and by how
    much. With an update rule by which ranks take steps alone, what has met is compared, and
    ``HvdsyncError`` is raised where replicas may differ. With one rank it returns at once.
    """
    if not getattr(optimizer, "replicas_equal", True):
        raise replicas.between_meetings()
    replicas.check(lambda: without(_entries(model, optimizer, scaler), ignore))


class Guard(guard.Guard):
    __doc__ = guard.Guard.__doc__

    def check(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        scaler: Any = None,
    ) -> bool:
        """To be called once per step, on every rank; True when replicas were repaired.

        Arguments are those of :func:`check_replicas`. Collective at every ``every``-th call, with
        17 bytes a rank on the wire while replicas are equal. Raises :class:`ReplicaMismatch` on
        every rank when they differ, or when a repair did not make them equal, and
        :class:`RankMismatch` when the models' shapes differ, so that none is possible.
        """
        return self._check(
            lambda: _entries(model, optimizer, scaler),
            lambda root: _spread(root, model, optimizer, scaler),
            lambda: _nothing_is_equal(optimizer),
        )

    def _attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """See the model's inputs from now on, and compare replicas after the optimizer's steps."""
        steps = guard.StepCount()

        def after_step(*_: Any) -> None:
            self._compare(
                steps.next(),
                lambda: _entries(model, optimizer, None),
                lambda root: _spread(root, model, optimizer, None),
                lambda: _nothing_is_equal(optimizer),
            )

        optimizer.register_step_post_hook(after_step)
        model.register_forward_pre_hook(ForwardHook(self._show_input), with_kwargs=True)

    def _show_input(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at what a model is called with, where gradients will be computed from it."""
        # A compiler would take what happens here into its graph.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.watch(args, kwargs)


def _equal_now(optimizer: Any) -> list[torch.Tensor] | None:
    """What is meant to be equal on all ranks after this step; None for everything."""
    local = getattr(optimizer, "_local", None)
    return None if local is None else local.equal_now()


def _nothing_is_equal(optimizer: Any) -> bool:
    equal = _equal_now(optimizer)
    return equal is not None and not equal


def _spread(root: int, model: torch.nn.Module, optimizer: Any, scaler: Any) -> None:
    equal = _equal_now(optimizer)
    if equal is not None:
        refuse_different(equal)
        broadcast_parameters(equal, root)
        return
    # A broadcast of other shapes would break in the middle.
    refuse_different([v for v in model.state_dict().values() if torch.is_tensor(v)])
    broadcast_model(model, root)
    if optimizer is not None:
        broadcast_optimizer_state(optimizer, root)
    if scaler is not None:
        scaler.load_state_dict(broadcast_object(scaler.state_dict(), root))


def _entries(model: torch.nn.Module, optimizer: Any, scaler: Any) -> list[Entry]:
    equal = _equal_now(optimizer)
    if equal is not None:
        names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        return [tensor_entry(names.get(id(t), f"tensor{i}"), t) for i, t in enumerate(equal)]
    entries: list[Entry] = []
    seen: set[tuple[Any, ...]] = set()
    for name, value in model.state_dict().items():
        if torch.is_tensor(value) and not is_lazy(value):
            # A matrix in two places is read once.
            place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if place not in seen or not value.numel():
                entries.append(tensor_entry(name, value))
            seen.add(place)
    if optimizer is not None:
        entries += _optimizer_entries(model, optimizer)
    if scaler is not None:
        entries += _leaves("scaler", scaler.state_dict())
    return entries


def _optimizer_entries(model: torch.nn.Module, optimizer: Any) -> Iterator[Entry]:
    names = {p: name for name, p in model.named_parameters()}
    for i, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        yield from _leaves(f"optimizer.param_groups.{i}", options)
        for j, parameter in enumerate(group["params"]):
            label = names.get(parameter, f"group{i}.param{j}")
            if parameter in optimizer.state:
                yield from _leaves(f"optimizer.state.{label}", optimizer.state[parameter])


def _leaves(name: str, tree: Any) -> Iterator[Entry]:
    for label, value in flatten(name, tree):
        if torch.is_tensor(value):
            yield tensor_entry(label, value)
        elif isinstance(value, _PLAIN):
            yield plain_entry(label, value)


def tensor_entry(name: str, tensor: torch.Tensor) -> Entry:
    tensor = tensor.detach()
    return Entry(name, name, kind_of(tensor), lambda: _bits(tensor), lambda: numbers_of(tensor))


def _bits(tensor: torch.Tensor) -> np.ndarray:
    return _on_host(tensor).contiguous().reshape(-1).view(torch.uint8).numpy()


def numbers_of(tensor: torch.Tensor) -> np.ndarray | None:
    tensor = _on_host(tensor)
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        tensor = tensor.float()  # NumPy lacks bfloat16 and the kinds of eight bits
    elif tensor.dtype == torch.bool:
        tensor = tensor.to(torch.uint8)
    return np.array(tensor.numpy())


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.cpu().resolve_conj().resolve_neg()
