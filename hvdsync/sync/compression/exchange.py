"""How a compressor of whole buckets and a reducer talk: a flat tensor in, its mean over ranks out.

In between the compressor asks for collectives, one after the other. What it computes is written
once, over the few array operations of :class:`Arrays`; how a collective is made, and when it is
waited for, is each framework's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias


@dataclass(frozen=True)
class Part:
    """A tensor within a flat one: its name, equal on all ranks, and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Collective:
    """What a compressor has travel next.

    ``sum``: a tensor of any shape comes back as the sum over ranks. ``gather``: (n,) comes back as
    (ranks, n). ``alltoall``: row r of (ranks, n) goes to rank r; row r of what comes back is of
    rank r.
    """

    kind: Literal["sum", "gather", "alltoall"]
    tensor: Any


State: TypeAlias = dict[str, Any]
"""What is remembered of one tensor from step to step, by name. Its arrays keep their shapes."""

Exchange: TypeAlias = Generator[Collective, Any, tuple[list[Any], list[State]]]


class Arrays(Protocol):
    """Array operations that frameworks name differently; operators and slices they share."""

    def dtype(self, x: Any) -> str:
        """``float32``, ``bfloat16``, ..."""

    def cast(self, x: Any, dtype: str) -> Any:
        """In another dtype, rounded to nearest."""

    def divide(self, x: Any, by: Any) -> Any:
        """``x`` over an integer, which may be a tensor."""

    def reshape(self, x: Any, shape: Sequence[Any]) -> Any:
        """In another shape."""

    def concat(self, parts: Sequence[Any]) -> Any:
        """Flat tensors, one behind the other."""

    def split(self, x: Any, sizes: Sequence[int]) -> list[Any]:
        """A flat tensor in parts."""

    def padded(self, x: Any, multiple: Any) -> Any:
        """A flat tensor with zeros behind it, up to a multiple of a length."""

    def to_bytes(self, x: Any) -> Any:
        """The bytes of a flat tensor, as ``uint8``."""

    def from_bytes(self, x: Any, dtype: str) -> Any:
        """A flat tensor of these bytes."""

    def sum_rows(self, x: Any) -> Any:
        """The sum over axis 0."""

    def matmul(self, a: Any, b: Any, *, turn_a: bool = False, turn_b: bool = False) -> Any:
        """The product of matrices, the first or the second transposed."""

    def orthonormal(self, x: Any) -> Any:
        """Orthonormal columns that span those of ``x``, which is not wider than high."""

    def zeros_like(self, x: Any) -> Any:
        """Zeros."""

    def mean(self, x: Any) -> Any:
        """Of all elements."""

    def zero_or_nan(self, x: Any) -> Any:
        """0, or NaN where ``x`` has elements that are not finite."""

    def where_at_least(self, x: Any, least: Any) -> Any:
        """Indices of the elements that are not below ``least``."""

    def length(self, x: Any) -> Any:
        """Number of elements of a flat tensor."""

    def top(self, x: Any, count: int) -> Any:
        """Indices of the ``count`` largest elements, in any order."""

    def lowest(self, x: Any) -> Any:
        """The smallest element."""

    def take(self, x: Any, indices: Any) -> Any:
        """These elements."""

    def put(self, x: Any, indices: Any, value: float) -> Any:
        """``x`` with one value at these indices."""

    def add_at(self, x: Any, indices: Any, values: Any) -> Any:
        """``x`` with values added at indices that differ; may change ``x``."""

    def choose(self, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """What the one function or the other gives."""

    def pack_signs(self, x: Any) -> Any:
        """One bit for each element of a flat tensor, 1 where it is not below 0; as ``uint8``."""

    def unpack_signs(self, bits: Any, size: int, dtype: str) -> Any:
        """The first ``size`` signs of packed ones, as 1 and -1."""


class BucketCompressor:
    """Compresses whole buckets, and says itself which collectives carry them.

    What it knows of one optimizer's tensors is handed to it and given back, never kept in it: one
    object may serve several optimizers.
    """

    keeps_error = False
    """Whether what was not sent is remembered, and sent later."""
    start_step = 0
    """Steps at the beginning that travel uncompressed."""

    @property
    def description(self) -> str:
        """For people and for comparing ranks."""
        return repr(self)

    def handles(self, dtype: str) -> bool:
        """Whether it makes tensors of this dtype smaller; others travel as they are."""
        return dtype in ("float32", "float64")

    def safe_norm(self, largest: float, ranks: Any) -> Any:
        """Below this norm on each rank no element can overflow on its way.

        ``largest`` is the largest number of the tensor's dtype.
        """
        return largest / ranks

    def initial_state(self, part: Part, dtype: str) -> State:
        """What is remembered of a tensor at first, as NumPy arrays."""
        return {}

    def exchange(
        self, xp: Arrays, flat: Any, parts: Sequence[Part], states: Sequence[State], ranks: Any
    ) -> Exchange:
        """The mean over ``ranks`` ranks of a flat tensor, which begins with ``parts``.

        What is behind the parts arrives without loss. Gives the result in pieces, in order, and
        the new states of the parts. All ranks come to the same bits.
        """
        raise NotImplementedError

    def compress(self, tensor: Any) -> tuple[Any, Any]:
        """Refuses: a tensor alone has no bucket, and no step before and after it."""
        raise ValueError(
            f"{self.description} compresses the gradients of an optimizer or tape, and remembers "
            "what it did not send; give it to DistributedOptimizer or distribute, and a single "
            "collective Compression.none, .fp16 or .bf16"
        )

    def decompress(self, tensor: Any, ctx: Any) -> Any:
        """Refuses, as :meth:`compress`."""
        return self.compress(tensor)
