"""What one optimizer's compressor remembers of each tensor, on this rank, from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdsync.sync.compression.exchange import BucketCompressor, Part, State


class Memory:
    """States of tensors by name. ``steps`` counts the reductions so far."""

    def __init__(self, xp: Any, compressor: BucketCompressor) -> None:
        self.steps = 0
        self._xp = xp
        self._compressor = compressor
        self._states: dict[str, State] = {}

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
        self._states[part.name] = state
