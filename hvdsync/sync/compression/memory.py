"""What one optimizer's compressor remembers of each tensor, on this rank, from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdsync.sync.compression.exchange import Part, State


class Memory:
    """States of tensors by name, and ``steps``, the number of reductions so far.

    ``xp`` are the framework's arrays: a state's values are tensors that are replaced, or variables
    that are assigned to.
    """

    def __init__(self, xp: Any, compressor: Any) -> None:
        self._xp = xp
        self._compressor = compressor
        self._states: dict[str, State] = {}
        self.steps: Any = xp.counter() if getattr(compressor, "start_step", 0) else 0

    def recall(self, parts: Sequence[Part], like: Any) -> list[State]:
        """The states of these tensors, parts of a flat tensor ``like``; new ones at first."""
        return [self._recall(part, like) for part in parts]

    def _recall(self, part: Part, like: Any) -> State:
        if part.name not in self._states:
            initial = self._compressor.initial_state(part, self._xp.dtype(like))
            self._states[part.name] = {
                key: self._xp.variable(array, like) for key, array in initial.items()
            }
        return self._states[part.name]

    def remember(self, part: Part, state: State) -> None:
        """Replace the state of a tensor."""
        own = self._states[part.name]
        for key, value in state.items():
            own[key] = self._xp.assign(own[key], value)

    def forget(self, prefix: str) -> None:
        """Drop the states of the tensors whose names begin so."""
        self._states = {n: s for n, s in self._states.items() if not n.startswith(prefix)}

    def count_step(self) -> None:
        """One more reduction is over."""
        self.steps = self._xp.assign(self.steps, self.steps + 1)
