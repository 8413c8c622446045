"""Half the bytes by half the precision: ``fp16`` and ``bf16``. No state; nothing is remembered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdsync.sync.compression.compressor import Compressor
from hvdsync.sync.compression.exchange import (
    Arrays,
    BucketCompressor,
    Collective,
    Exchange,
    Part,
    State,
)


class CastCompressor(BucketCompressor, Compressor):
    """Sends floating-point tensors in a narrower dtype: half the bytes of float32."""

    name: str

    def __init__(self, cast: Callable[[Any, Any], Any], is_floating: Callable[[Any], bool]) -> None:
        self._cast = cast
        self._is_floating = is_floating

    @property
    def description(self) -> str:
        return self.name

    def compress(self, tensor: Any) -> tuple[Any, Any]:  # type: ignore[override]
        if not self._is_floating(tensor):
            return tensor, None
        return self._cast(tensor, self.name), tensor.dtype

    def decompress(self, tensor: Any, ctx: Any) -> Any:  # type: ignore[override]
        return tensor if ctx is None else self._cast(tensor, ctx)


class HalfPrecision(CastCompressor):
    """``fp16``: IEEE half precision, 11 bits and numbers from 6e-8 to 65,504.

    On the wire: one all-reduce of 2 bytes per element. Each rank divides before it rounds, so that
    the sum overflows only where the mean itself does; stands for Horovod's compressor of the same
    name, where sums beyond 65,504 are infinite.
    """

    name = "float16"

    def safe_norm(self, largest: float, ranks: Any) -> Any:
        return 65504.0

    def exchange(
        self, xp: Arrays, flat: Any, parts: Sequence[Part], states: Sequence[State], ranks: Any
    ) -> Exchange:
        mean = yield Collective("sum", xp.cast(xp.divide(flat, ranks), self.name))
        return [xp.cast(mean, xp.dtype(flat))], []


class BrainFloat(CastCompressor):
    """``bf16``: the range of float32 with 8 bits of precision, on CPUs too.

    On the wire: an all-to-all of 2 bytes per element, of which each rank adds up its part in the
    precision that it came in, and an all-gather of the rounded parts: as many bytes as an
    all-reduce of halves. Neither Horovod nor Gloo has to know the type.
    """

    name = "bfloat16"

    def exchange(
        self, xp: Arrays, flat: Any, parts: Sequence[Part], states: Sequence[State], ranks: Any
    ) -> Exchange:
        dtype = xp.dtype(flat)
        bytes_of_rows = xp.to_bytes(xp.cast(xp.padded(flat, ranks), self.name))
        received = yield Collective("alltoall", xp.reshape(bytes_of_rows, (ranks, -1)))
        rows = xp.from_bytes(xp.reshape(received, (-1,)), self.name)
        total = xp.sum_rows(xp.cast(xp.reshape(rows, (ranks, -1)), dtype))
        mean = xp.cast(xp.divide(total, ranks), self.name)
        gathered = yield Collective("gather", xp.to_bytes(mean))
        whole = xp.cast(xp.from_bytes(xp.reshape(gathered, (-1,)), self.name), dtype)
        return [whole[: xp.length(flat)]], []
