"""The largest elements only: ``topk``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdsync.sync.compression.error_feedback import Compressed, ErrorFeedback, zeros
from hvdsync.sync.compression.exchange import Arrays, Collective, Part, State

SMALLEST = 1024
"""Tensors of fewer elements are not worth it; they travel whole."""

# A threshold is taken from about so many elements.
_SAMPLE = 16_384


@dataclass(frozen=True)
class TopK(ErrorFeedback):
    """Each rank sends the ``ratio`` of a tensor's elements that are largest (arXiv 1712.01887).

    They are exactly the largest ones; a threshold from a sample only leaves most of the others out
    of the search. With ``momentum`` each rank applies it to its own gradients before it chooses,
    and forgets it where it sends: give it here in place of the optimizer's momentum.

    On the wire: one all-gather; of each tensor ``k = ceil(ratio * elements)`` indices (int32) and
    values, and tensors of fewer than 1,024 elements whole.
    """

    ratio: float = 0.01
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 0.25:
            raise ValueError(
                f"topk: ratio is {self.ratio}; expected a share of the elements above 0 and up to "
                "0.25, beyond which indices and values are no fewer bytes than half precision"
            )
        if not 0 <= self.momentum < 1:
            raise ValueError(f"topk: momentum is {self.momentum}; expected 0 or more and below 1")

    def compresses(self, shape: tuple[int, ...]) -> bool:
        return SMALLEST <= math.prod(shape) < 2**31

    def count(self, size: int) -> int:
        """How many of ``size`` elements are sent."""
        return math.ceil(self.ratio * size)

    def initial_state(self, part: Part, dtype: str) -> State:
        state = super().initial_state(part, dtype)
        if state and self.momentum:
            state["velocity"] = zeros(part.size, dtype)
        return state

    def _exchange(
        self,
        xp: Arrays,
        gradients: Sequence[Any],
        states: Sequence[State],
        shapes: Sequence[tuple[int, ...]],
        whole: Any,
        ranks: Any,
    ) -> Compressed:
        dtype = xp.dtype(whole)
        sizes = [math.prod(shape) for shape in shapes]
        counts = [self.count(size) for size in sizes]
        indices, values, new = [], [], []
        for gradient, state, size, count in zip(gradients, states, sizes, counts, strict=True):
            velocity = gradient
            if self.momentum:
                velocity = self.momentum * state["velocity"] + gradient
            total = state["error"] + velocity
            chosen = largest(xp, abs(total), size, count)
            indices.append(xp.cast(chosen, "int32"))
            # What is not finite may be too small to be chosen, and is to be seen all the same.
            values.append(xp.take(total, chosen) + xp.zero_or_nan(total))
            changed = {"error": xp.put(total, chosen, 0.0)}
            if self.momentum:
                changed["velocity"] = xp.put(velocity, chosen, 0.0)
            new.append(changed)
        numbers = xp.concat([*values, whole])
        packed = [xp.to_bytes(numbers)]
        if indices:
            packed.insert(0, xp.to_bytes(xp.concat(indices)))
        gathered = yield Collective("gather", xp.concat(packed))

        means = [xp.zeros_like(gradient) for gradient in gradients]
        whole = xp.zeros_like(whole)
        head = 4 * sum(counts)
        # One rank after the other: the same order of additions, hence the same bits, everywhere.
        for row in range(ranks):
            if indices:
                places = xp.split(xp.from_bytes(gathered[row][:head], "int32"), counts)
            else:
                places = []
            *found, rest = xp.split(
                xp.from_bytes(gathered[row][head:], dtype), [*counts, whole.shape[0]]
            )
            for i, (place, value) in enumerate(zip(places, found, strict=True)):
                means[i] = xp.add_at(means[i], place, value)
            whole = whole + rest
        return [xp.divide(mean, ranks) for mean in means], xp.divide(whole, ranks), new


def largest(xp: Arrays, magnitudes: Any, size: int, count: int) -> Any:
    """Indices of the ``count`` largest of ``size`` numbers."""
    stride = size // _SAMPLE | 1  # odd: no multiple of the usual lengths of rows
    if stride == 1:
        return xp.top(magnitudes, count)
    sample = magnitudes[::stride]
    # Twice as many as wanted, so that chance seldom leaves too few.
    wanted = min(math.ceil(2 * count / stride), -(-size // stride))
    least = xp.lowest(xp.take(sample, xp.top(sample, wanted)))
    candidates = xp.where_at_least(magnitudes, least)
    return xp.choose(
        xp.length(candidates) >= count,
        lambda: xp.take(candidates, xp.top(xp.take(magnitudes, candidates), count)),
        lambda: xp.top(magnitudes, count),
    )
