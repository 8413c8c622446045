"""Local steps of a PyTorch optimizer: its steps in, meetings of replicas at the right ones out.

What a meeting is, ``hvdsync.sync.torch_local_steps`` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdsync.guard.guard import Guard
from hvdsync.sync.torch_local_steps import TorchLocalSteps
from hvdsync.sync.update_rules import LocalRule
from hvdsync.torch.functions import broadcast_optimizer_state, broadcast_parameters
from hvdsync.torch.gradients import GradientReducer

# What ``state_dict()`` of the optimizer has of this; plain optimizers leave it unread.
STATE_KEY = "update_rule"


class LocalUpdates(TorchLocalSteps):
    """The local steps of ``optimizer``.

    ``reducer`` averages its gradients, and is told to leave that when the warm-up is over.
    ``buffers`` may be set to what gives the (name, tensor) pairs that meet with the last fragment:
    floating-point ones have their mean, others become those of rank 0.
    """

    def __init__(
        self,
        rule: LocalRule,
        optimizer: torch.optim.Optimizer,
        reducer: GradientReducer,
        guard: Guard | None,
    ) -> None:
        super().__init__(
            torch,
            rule,
            reducer.wire,
            parameters=reducer.parameters,
            statistics=lambda: self._buffers(floating=True),
            share_state=lambda: broadcast_optimizer_state(optimizer, 0),
            guard=guard,
        )
        self.buffers: Callable[[], Iterable[tuple[str, torch.Tensor]]] = lambda: ()
        self._reducer = reducer
        self._hooks = (
            optimizer.register_step_pre_hook(lambda *_: self.before_step()),
            optimizer.register_step_post_hook(lambda *_: self.after_step()),
        )
        self._choose_who_reduces()

    @property
    def waited_seconds(self) -> float:
        """Seconds in which training stood still for communication so far."""
        return 0.0 if self.wire is None else self.wire.waited_seconds

    def after_step(self) -> None:
        super().after_step()
        self._choose_who_reduces()

    def equal_now(self) -> list[torch.Tensor] | None:
        """Parameters and buffers that are equal on all ranks now; None when all state is."""
        return None if self.is_all_equal else self.equal_tensors()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        super().load_state_dict(state)
        self._choose_who_reduces()

    def _meet(self, which: Sequence[int]) -> None:
        super()._meet(which)
        if self.parts - 1 in which:
            broadcast_parameters(self._buffers(floating=False))

    def _buffers(self, *, floating: bool) -> list[tuple[str, torch.Tensor]]:
        return [(name, b) for name, b in self.buffers() if b.is_floating_point() is floating]

    def _choose_who_reduces(self) -> None:
        self._reducer.travel(None if self.is_warm else self.wire)
