"""What one optimizer's compressor remembers of each tensor, on this rank, from step to step.

States of tensors by name; into checkpoints as plain arrays, and out of them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdsync.errors import CheckpointError
from hvdsync.sync.compression.compressor import describe
from hvdsync.sync.compression.exchange import Part, State


class Memory:
    """States of tensors by name; ``steps`` counts reductions where a compressor starts late.

    ``xp`` are the framework's arrays: a state's values are tensors that are replaced, or variables
    that are assigned to.
    """

    def __init__(self, xp: Any, compressor: Any) -> None:
        self._xp = xp
        self._compressor = compressor
        self._parts: dict[str, Part] = {}
        self._states: dict[str, State] = {}
        # Of a checkpoint, until their tensors are met.
        self._saved: dict[str, State] = {}
        self._counts_steps = bool(getattr(compressor, "start_step", 0))
        self.steps: Any = xp.counter() if self._counts_steps else 0

    def recall(self, parts: Sequence[Part], like: Any) -> list[State]:
        """The states of these tensors, parts of a flat tensor ``like``; new ones at first."""
        return [self._recall(part, like) for part in parts]

    def _recall(self, part: Part, like: Any) -> State:
        if part.name not in self._states:
            initial = self._compressor.initial_state(part, self._xp.dtype(like))
            initial.update(self._saved.pop(part.name, {}))
            self._parts[part.name] = part
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
        if self._counts_steps:
            self.steps = self._xp.assign(self.steps, self.steps + 1)

    def state_dict(self) -> dict[str, Any]:
        """What is remembered, as plain values and NumPy arrays."""
        met = {
            name: {key: self._xp.to_numpy(value) for key, value in state.items()}
            for name, state in self._states.items()
            if state
        }
        return {
            "compressor": describe(self._compressor),
            "steps": int(self.steps),
            "tensors": {**self._saved, **met},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what was remembered when ``state`` was taken.

        Raises ``CheckpointError`` when it is another compressor's.
        """
        own = describe(self._compressor)
        if state["compressor"] != own:
            raise CheckpointError(
                f"what is remembered is of compression {state['compressor']}, expected {own}; give "
                "the same, or leave the error feedback out of the restore"
            )
        if self._counts_steps:
            self.steps = self._xp.assign(self.steps, state["steps"])
        self._saved = dict(state["tensors"])
        for name, found in self._states.items():
            if not found:
                continue
            dtype = self._xp.dtype(next(iter(found.values())))
            wanted = self._compressor.initial_state(self._parts[name], dtype)
            wanted.update(self._saved.pop(name, {}))
            for key, array in wanted.items():
                found[key] = self._xp.assign(found[key], self._xp.like(array, found[key]))


class ErrorFeedback:
    """What a distributed optimizer's compressor remembers on each rank, for checkpoints.

    Given to ``Checkpoint.save`` and ``restore`` under a name of its own it makes a run that goes
    on come to the bits of the run that did not stop. It is as large as the gradients (twice that
    with momentum correction), from every rank. A checkpoint of another number of ranks leaves it
    out, with a warning. Where nothing is remembered it is empty.
    """

    per_rank = True

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`Memory.state_dict`; empty where nothing is remembered."""
        memory = self._memory()
        return {} if memory is None else memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See :meth:`Memory.load_state_dict`."""
        memory = self._memory()
        if memory is not None and state:
            memory.load_state_dict(state)

    def _memory(self) -> Memory | None:
        sharing = getattr(self._optimizer, "_sharing", None)
        reducer = self._optimizer._reducer if sharing is None else sharing.reducer
        return getattr(reducer, "memory", None)
