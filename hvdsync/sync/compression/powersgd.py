"""Gradients as products of two thin matrices: ``powersgd``."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdsync.sync.compression.error_feedback import Compressed, ErrorFeedback
from hvdsync.sync.compression.exchange import Arrays, Collective, Part, State


@dataclass(frozen=True)
class PowerSGD(ErrorFeedback):
    """Low-rank approximation by one step of power iteration from the last one (arXiv 1905.13727).

    A tensor of two or more axes is a matrix, of its first axis or its last and the rest. It is
    compressed if that halves its bytes or better; others travel as they are. The first
    ``start_step`` steps travel uncompressed, since early gradients approximate badly.

    On the wire: an all-reduce of ``rows * rank`` elements for each of them, beside the tensors that
    are not compressed, then one of ``columns * rank``. Remembered: the error, and as many elements
    as travel last, equal on all ranks.
    """

    rank: int = 4
    start_step: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"powersgd: rank is {self.rank}; expected 1 or more")
        if self.start_step < 0:
            raise ValueError(f"powersgd: start_step is {self.start_step}; expected 0 or more")

    def compresses(self, shape: tuple[int, ...]) -> bool:
        rows, columns = as_matrix(shape)
        return 2 * self._rank_of(shape) * (rows + columns) <= rows * columns

    def initial_state(self, part: Part, dtype: str) -> State:
        state = super().initial_state(part, dtype)
        if state:
            # Here, since a command line names compressors before threads are settled.
            import numpy as np

            # Alike on all ranks, and unlike between tensors.
            random = np.random.default_rng(zlib.crc32(part.name.encode()))
            size = as_matrix(part.shape)[1], self._rank_of(part.shape)
            state["q"] = random.standard_normal(size).astype(dtype)
        return state

    def _rank_of(self, shape: tuple[int, ...]) -> int:
        return min(self.rank, *as_matrix(shape))

    def _exchange(
        self,
        xp: Arrays,
        gradients: Sequence[Any],
        states: Sequence[State],
        shapes: Sequence[tuple[int, ...]],
        whole: Any,
        ranks: Any,
    ) -> Compressed:
        matrices = [
            xp.reshape(gradient + state["error"], as_matrix(shape))
            for gradient, state, shape in zip(gradients, states, shapes, strict=True)
        ]
        products = [
            xp.matmul(matrix, state["q"]) for matrix, state in zip(matrices, states, strict=True)
        ]
        products, whole = yield from _mean(xp, products, whole, ranks)
        if not matrices:
            return [], whole, []
        bases = [xp.orthonormal(product) for product in products]
        own = [
            xp.matmul(matrix, base, turn_a=True)
            for matrix, base in zip(matrices, bases, strict=True)
        ]
        means, _ = yield from _mean(xp, own, whole[:0], ranks)
        reduced = [xp.matmul(p, q, turn_b=True) for p, q in zip(bases, means, strict=True)]
        errors = [
            matrix - xp.matmul(p, q, turn_b=True)
            for matrix, p, q in zip(matrices, bases, own, strict=True)
        ]
        return (
            [xp.reshape(matrix, (-1,)) for matrix in reduced],
            whole,
            [
                {"error": xp.reshape(error, (-1,)), "q": q}
                for error, q in zip(errors, means, strict=True)
            ],
        )


def as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor: its first axis against the rest, or the rest against its last.

    What makes their sum less counts. Frameworks have output channels first or last, and both cut a
    convolution there.
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    return min((shape[0], math.prod(shape[1:])), (math.prod(shape[:-1]), shape[-1]), key=sum)


def _mean(xp: Arrays, matrices: Sequence[Any], whole: Any, ranks: Any) -> Any:
    """Means of matrices and of a flat tensor, by one all-reduce."""
    shapes = [tuple(int(n) for n in matrix.shape) for matrix in matrices]
    flat = xp.concat([*(xp.reshape(matrix, (-1,)) for matrix in matrices), whole])
    total = yield Collective("sum", flat)
    *parts, whole = xp.split(
        xp.divide(total, ranks), [*(rows * columns for rows, columns in shapes), whole.shape[0]]
    )
    return [xp.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)], whole
