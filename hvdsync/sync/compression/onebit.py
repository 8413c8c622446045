"""One bit per element: ``onebit``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdsync.sync.compression.error_feedback import Compressed, ErrorFeedback
from hvdsync.sync.compression.exchange import Arrays, Collective, State
from hvdsync.sync.compression.topk import SMALLEST


@dataclass(frozen=True)
class OneBit(ErrorFeedback):
    """Each rank sends signs, and the mean magnitude of each tensor (Seide et al., Interspeech 2014;
    scaled as in arXiv 1901.09847).

    On the wire: one all-gather; of each tensor a bit per element, rounded up to bytes, and one
    number; tensors of fewer than 1,024 elements whole.
    """

    def compresses(self, shape: tuple[int, ...]) -> bool:
        return math.prod(shape) >= SMALLEST

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
        lengths = [-(-size // 8) for size in sizes]
        totals = [g + state["error"] for g, state in zip(gradients, states, strict=True)]
        signs = [xp.pack_signs(total) for total in totals]
        scales = [xp.mean(abs(total)) for total in totals]
        new = [
            {"error": total - scale * xp.unpack_signs(bits, size, dtype)}
            for total, bits, scale, size in zip(totals, signs, scales, sizes, strict=True)
        ]
        numbers = xp.concat([*(xp.reshape(scale, (1,)) for scale in scales), whole])
        gathered = yield Collective("gather", xp.concat([*signs, xp.to_bytes(numbers)]))

        means = [xp.zeros_like(total) for total in totals]
        whole = xp.zeros_like(whole)
        head = sum(lengths)
        # One rank after the other: the same order of additions, hence the same bits, everywhere.
        for row in range(ranks):
            bits = xp.split(gathered[row][:head], lengths)
            numbers = xp.from_bytes(gathered[row][head:], dtype)
            for i, (packed, size) in enumerate(zip(bits, sizes, strict=True)):
                means[i] = means[i] + numbers[i] * xp.unpack_signs(packed, size, dtype)
            whole = whole + numbers[len(means) :]
        return [xp.divide(mean, ranks) for mean in means], xp.divide(whole, ranks), new
