"""Steps that each rank takes alone, and the meetings of replicas between them, for PyTorch.

One optimizer's steps come in; at those that the rule names, equal parameters come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdsync.comm import world
from hvdsync.guard.guard import Guard
from hvdsync.guard.torch_nonfinite import judge_meeting
from hvdsync.sync.local_steps import refuse_different_steps
from hvdsync.sync.torch_fragments import TorchFragments
from hvdsync.sync.update_rules import LocalRule
from hvdsync.torch.functions import broadcast_optimizer_state, broadcast_parameters
from hvdsync.torch.gradients import GradientReducer

# What ``state_dict()`` of the optimizer has of this; plain optimizers leave it unread.
STATE_KEY = "update_rule"


class LocalUpdates:
    """What a local rule adds to one optimizer: a count of steps, meetings, and their state.

    ``reducer`` averages the optimizer's gradients, and is told to leave that when the warm-up is
    over. ``buffers`` may be set to what gives the (name, tensor) pairs that meet with the
    parameters: floating-point ones have their mean, others become those of rank 0. A ``guard``
    judges what comes of a meeting.
    """

    def __init__(
        self,
        rule: LocalRule,
        optimizer: torch.optim.Optimizer,
        reducer: GradientReducer,
        guard: Guard | None,
    ) -> None:
        self.rule = rule
        self.steps = 0
        self.wire = reducer.wire
        self.buffers: Callable[[], Iterable[tuple[str, torch.Tensor]]] = lambda: ()
        self._optimizer = optimizer
        self._reducer = reducer
        self._guard = guard
        self._fragments: TorchFragments | None = None
        self._met: set[int] = set()
        self._parameters_are_equal = self._state_is_equal = True
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )
        self._choose_who_reduces()

    # Steps

    @property
    def _is_warm(self) -> bool:
        return self.steps >= self.rule.warmup_steps

    def _choose_who_reduces(self) -> None:
        self._reducer.travel(None if self._is_warm else self.wire)

    def _before_step(self, *_: Any) -> None:
        if self._is_warm:
            self._planned()

    def _after_step(self, *_: Any) -> None:
        self.steps += 1
        self._choose_who_reduces()
        if self.steps <= self.rule.warmup_steps:
            return
        self._met.clear()
        self._parameters_are_equal = self._state_is_equal = False
        fragments = self._planned()
        due = [i for i in range(len(fragments)) if self.rule.is_due(self.steps, i)]
        if due:
            self._meet(due)

    def _planned(self) -> TorchFragments:
        """The fragments of the parameters that there are; anchors are those of before the step."""
        named = self._reducer.parameters()
        old = self._fragments
        if old is not None and len(old.parameters) == len(named):
            return old
        self._fragments = TorchFragments(
            torch,
            self.rule,
            self.wire,
            named,
            [(name, b) for name, b in self.buffers() if b.is_floating_point()],
            None if self._guard is None else self._judge,
        )
        if old is not None:
            self._put_outer_state(old.parameters, old.outer_state())
        return self._fragments

    def _put_outer_state(
        self, parameters: Sequence[torch.Tensor], state: Mapping[str, Sequence[torch.Tensor]]
    ) -> None:
        assert self._fragments is not None
        place = {id(p): i for i, p in enumerate(self._fragments.parameters)}
        for kind, targets in self._fragments.outer_state().items():
            for parameter, value in zip(parameters, state.get(kind, ()), strict=False):
                if id(parameter) in place:
                    targets[place[id(parameter)]].copy_(value)

    @property
    def waited_seconds(self) -> float:
        """Seconds in which training stood still for communication so far."""
        return 0.0 if self.wire is None else self.wire.waited_seconds

    # Meetings

    @property
    def replicas_equal(self) -> bool:
        """Whether parameters are equal on all ranks now; the same on all of them."""
        return self._parameters_are_equal or world.current().size == 1

    def equal_now(self) -> list[torch.Tensor] | None:
        """Parameters and buffers that are equal on all ranks now; None when all state is."""
        if self.replicas_equal and self._state_is_equal:
            return None
        return [] if self._fragments is None else self._fragments.tensors(sorted(self._met))

    def synchronize_replicas(self) -> None:
        """Make all state equal on all ranks, by an early meeting where it is not; collective."""
        if self.replicas_equal and self._state_is_equal:
            return
        self._meet([i for i in range(len(self._planned())) if i not in self._met])
        broadcast_optimizer_state(self._optimizer, 0)
        self._state_is_equal = True

    def _meet(self, which: Sequence[int]) -> None:
        if self.wire is not None:
            refuse_different_steps(self.steps)
        fragments = self._planned()
        if self.wire is not None or self.rule.has_outer_optimizer:
            fragments.synchronize(which)
        if len(fragments) - 1 in which:
            broadcast_parameters([b for _, b in self.buffers() if not b.is_floating_point()])
        self._met.update(which)
        self._parameters_are_equal = len(self._met) == len(fragments)

    def _judge(self, names: Sequence[str], own: Sequence[Any], met: Sequence[Any]) -> None:
        assert self._guard is not None
        judge_meeting(torch, self._guard, names, own, met, self.steps)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Steps, and of an outer optimizer anchor and momentum of each parameter."""
        outer = {} if self._fragments is None else self._fragments.outer_state()
        return {"steps": self.steps, **outer}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take up a state of :meth:`state_dict`, also of another rule; None begins anew."""
        state = state or {}
        self.steps = int(state.get("steps", 0))
        self._choose_who_reduces()
        self._fragments = None
        self._met.clear()
        self._parameters_are_equal = self._state_is_equal = True
        parameters = [parameter for _, parameter in self._reducer.parameters()]
        if self._is_warm and len(state.get("anchor", ())) == len(parameters):
            self._planned()
            self._put_outer_state(parameters, state)
