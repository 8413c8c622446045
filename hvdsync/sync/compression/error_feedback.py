"""What all lossy compressors share: what a rank did not send now, it adds to what it sends next.

Gradients in; what of them travels is each method's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias

from hvdsync.sync.compression.exchange import (
    Arrays,
    BucketCompressor,
    Collective,
    Exchange,
    Part,
    State,
)

Compressed: TypeAlias = Generator[Collective, Any, tuple[list[Any], Any, list[State]]]


class ErrorFeedback(BucketCompressor):
    """Compresses the tensors of a bucket for which that pays; the others arrive without loss.

    Over any number of steps the sum of what has arrived is the sum of all ranks' gradients, less
    what the ranks still remember (Seide et al. 2014; Karimireddy et al., arXiv 1901.09847).
    """

    keeps_error = True

    @abstractmethod
    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape is compressed; equal on all ranks."""

    @abstractmethod
    def _exchange(
        self,
        xp: Arrays,
        gradients: Sequence[Any],
        states: Sequence[State],
        shapes: Sequence[tuple[int, ...]],
        whole: Any,
        ranks: Any,
    ) -> Compressed:
        """Means of flat ``gradients`` that are compressed and of ``whole``, which is not."""

    def initial_state(self, part: Part, dtype: str) -> State:
        if not self.compresses(part.shape):
            return {}
        return {"error": zeros(part.size, dtype)}

    def exchange(
        self, xp: Arrays, flat: Any, parts: Sequence[Part], states: Sequence[State], ranks: Any
    ) -> Exchange:
        sizes = [part.size for part in parts]
        pieces = xp.split(flat, [*sizes, flat.shape[0] - sum(sizes)])
        small = [i for i, part in enumerate(parts) if not self.compresses(part.shape)]
        large = [i for i in range(len(parts)) if i not in set(small)]
        small.append(len(parts))
        means, whole, changed = yield from self._exchange(
            xp,
            [pieces[i] for i in large],
            [states[i] for i in large],
            [parts[i].shape for i in large],
            xp.concat([pieces[i] for i in small]),
            ranks,
        )
        whole = xp.split(whole, [pieces[i].shape[0] for i in small])
        for i, piece in [*zip(large, means, strict=True), *zip(small, whole, strict=True)]:
            pieces[i] = piece
        new = list(states)
        for i, state in zip(large, changed, strict=True):
            new[i] = state
        return pieces, new


def zeros(size: int, dtype: str) -> Any:
    """A NumPy array of zeros."""
    # Here, since a command line names compressors before threads are settled.
    import numpy as np

    return np.zeros(size, dtype)
