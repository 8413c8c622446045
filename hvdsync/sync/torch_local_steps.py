"""Steps that each rank takes alone on tensors of PyTorch, and the meetings between them.

Told before and after each step; at those that the rule names, equal tensors come out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdsync.guard.guard import Guard
from hvdsync.guard.torch_nonfinite import judge_meeting
from hvdsync.sync.local_steps import LocalSteps, refuse_different_steps
from hvdsync.sync.torch_fragments import Named, TorchFragments
from hvdsync.sync.torch_wire import Wire
from hvdsync.sync.update_rules import LocalRule


class TorchLocalSteps(LocalSteps):
    """What a local rule adds to one optimizer: a count of steps, meetings, and their state.

    ``parameters`` gives the current (name, tensor) pairs, ``statistics`` those of floating-point
    tensors that have their mean with the last fragment. ``share_state`` gives all ranks the
    optimizer state of rank 0. A ``guard`` judges what comes of a meeting.
    """

    def __init__(
        self,
        torch: Any,
        rule: LocalRule,
        wire: Wire | None,
        *,
        parameters: Callable[[], Named],
        statistics: Callable[[], Named],
        share_state: Callable[[], None],
        guard: Guard | None,
    ) -> None:
        super().__init__(rule)
        self.wire = wire
        self._torch = torch
        self._steps = 0
        self._parameters = parameters
        self._statistics = statistics
        self._share = share_state
        self._guard = guard
        self._fragments: TorchFragments | None = None

    @property
    def steps(self) -> int:
        return self._steps

    @property
    def parts(self) -> int:
        return len(self._planned())

    @property
    def is_warm(self) -> bool:
        """Whether the steps from now on are each rank's own."""
        return self._steps >= self.rule.warmup_steps

    def before_step(self) -> None:
        """To be called before each step: anchors are the parameters that it begins with."""
        if self.is_warm:
            self._planned()

    def after_step(self) -> None:
        """To be called after each step, at which what is due meets; collective then."""
        self._steps += 1
        if self._steps > self.rule.warmup_steps:
            due = [i for i in range(self.parts) if self.rule.is_due(self._steps, i)]
            if due:
                self._meet(due)

    def equal_tensors(self) -> list[Any]:
        """The parameters and statistics that are equal on all ranks now."""
        return self._planned().tensors(self.met())

    def _meet(self, which: Sequence[int]) -> None:
        if self.wire is not None:
            refuse_different_steps(self._steps)
        if self.wire is not None or self.rule.has_outer_optimizer:
            self._planned().synchronize(which)

    def _share_state(self) -> None:
        self._share()

    def _planned(self) -> TorchFragments:
        """The fragments of the parameters that there are now."""
        named = self._parameters()
        old = self._fragments
        if old is not None and len(old.parameters) == len(named):
            return old
        judge = None if self._guard is None else self._judge
        self._fragments = TorchFragments(
            self._torch, self.rule, self.wire, named, self._statistics(), judge
        )
        if old is not None:
            self._put_outer_state(old.parameters, old.outer_state())
        return self._fragments

    def _judge(self, names: Sequence[str], own: Sequence[Any], met: Sequence[Any]) -> None:
        assert self._guard is not None
        judge_meeting(self._torch, self._guard, names, own, met, self._steps)

    def _put_outer_state(
        self, parameters: Sequence[Any], state: Mapping[str, Sequence[Any]]
    ) -> None:
        fragments = self._planned()
        place = {id(p): i for i, p in enumerate(fragments.parameters)}
        with self._torch.no_grad():
            for kind, targets in fragments.outer_state().items():
                for parameter, value in zip(parameters, state.get(kind, ()), strict=False):
                    if id(parameter) in place:
                        targets[place[id(parameter)]].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        """Steps, and of an outer optimizer anchor and momentum of each parameter."""
        outer = {} if self._fragments is None else self._fragments.outer_state()
        return {"steps": self._steps, **outer}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take up a state of :meth:`state_dict`, also of another rule; None begins anew."""
        state = state or {}
        self._steps = int(state.get("steps", 0))
        self._fragments = None
        parameters = [parameter for _, parameter in self._parameters()]
        if self.is_warm and len(state.get("anchor", ())) == len(parameters):
            self._put_outer_state(parameters, state)
        self._taken_up()
