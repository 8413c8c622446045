"""Steps of each rank alone for Keras optimizers: a rule in, an optimizer that follows it out.

Written once for both backends; how variables meet is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from hvdsync.comm import windows, world
from hvdsync.comm.dtypes import dtype_name
from hvdsync.guard.guard import Guard
from hvdsync.guard.keras_state import shared_variables
from hvdsync.sync.keras_optimizer import LocalTraining
from hvdsync.sync.tensorflow_gradients import name_of
from hvdsync.sync.torch_local_steps import TorchLocalSteps
from hvdsync.sync.torch_wire import Wire
from hvdsync.sync.update_rules import Asynchronous, LocalRule
from hvdsync.sync.variables import broadcast_through_host

# Gives the variables that an optimizer trains on all ranks; gives all its state of rank 0.
Trained: TypeAlias = Callable[[], list[Any]]
ShareState: TypeAlias = Callable[[], None]


def follow_rule(optimizer: Any, make: Callable[[Trained, ShareState], LocalTraining]) -> None:
    """Have each rank take steps of a distributed optimizer alone, as what is made says.

    Raises ``ValueError`` for an optimizer of Keras that accumulates gradients itself.
    """
    if getattr(optimizer, "gradient_accumulation_steps", None):
        raise ValueError(
            "update: the optimizer has gradient_accumulation_steps, of which nobody tells when a "
            "step is whole; use accumulate= in their place"
        )
    sharing = optimizer._sharing

    def trained() -> list[Any]:
        return [
            v for v in optimizer._trainable_variables if sharing.reducer.key(v) not in sharing.local
        ]

    def share_state() -> None:
        _, slots = shared_variables(optimizer._trainable_variables, optimizer)
        broadcast_through_host(slots, 0)

    sharing.local_steps = make(trained, share_state)


def without_need(rule: LocalRule | Asynchronous | None) -> LocalRule | Asynchronous | None:
    """The rule; None for one rank that would share with nobody.

    Raises :class:`LaunchError` for an asynchronous one in a launch that is not over MPI.
    """
    if isinstance(rule, Asynchronous):
        if world.current().size == 1:
            return None
        windows.require_launch()
    return rule


def statistics_among(variables: Sequence[Any], trained: Sequence[Any]) -> list[Any]:
    """Floating-point variables that no optimizer trains: moving averages, for instance."""
    known = {id(variable) for variable in trained}
    return [v for v in variables if id(v) not in known and "float" in dtype_name(v.dtype)]


class TorchVariableSteps(TorchLocalSteps):
    """See :class:`hvdsync.sync.keras_optimizer.LocalTraining`; for Keras variables on PyTorch."""

    def __init__(
        self, torch: Any, rule: LocalRule, wire: Wire | None, trained: Trained, share: ShareState
    ) -> None:
        super().__init__(
            torch,
            rule,
            wire,
            parameters=lambda: _tensors(trained()),
            statistics=lambda: _tensors(self.statistics),
            share_state=share,
            guard=None,
        )
        self.statistics: Sequence[Any] = ()
        self._trained = trained

    def run(
        self, shared: Callable[[], Any], alone: Callable[[], Any], guard: Guard | None = None
    ) -> None:
        """One step, of all ranks or of this one, and the meetings that are due."""
        self._guard = guard
        self.before_step()
        if self.is_warm:
            alone()
        else:
            shared()
        self.after_step()

    def equal_variables(self) -> list[Any]:
        """The variables that are equal on all ranks now."""
        equal = {id(tensor) for tensor in self.equal_tensors()}
        return [v for v in (*self._trained(), *self.statistics) if id(v._value) in equal]

    def state(self) -> dict[str, np.ndarray]:
        """The number of steps; anchor and momentum of each variable."""
        state = self.state_dict()
        arrays = {
            f"{kind}.{i}": tensor.detach().cpu().numpy().copy()
            for kind in ("anchor", "momentum")
            for i, tensor in enumerate(state.get(kind, ()))
        }
        return {"steps": np.array(self.steps, np.int64), **arrays}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Take up a :meth:`state`, also of another rule or backend; an empty one begins anew."""
        count = len(self._trained())
        lists = {
            kind: [self._torch.from_numpy(state[f"{kind}.{i}"]) for i in range(count)]
            for kind in ("anchor", "momentum")
            if f"{kind}.{count - 1}" in state
        }
        self.load_state_dict({"steps": state.get("steps", 0), **lists})


def _tensors(variables: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(name_of(variable), variable._value) for variable in variables]
