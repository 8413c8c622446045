"""What travels on the wire in place of a gradient: a tensor goes in, a smaller one comes out.

Written once for all frameworks; a front door hands in its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any


class Compressor:
    """Interface of a compressor (Horovod's): both methods are element-wise and keep the shape."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The tensor to send, and what :meth:`decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The received tensor in the dtype that was given to :meth:`compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends the tensor as it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point tensors in a narrower dtype: half the bytes of float32."""

    def __init__(
        self,
        dtype: str,
        cast: Callable[[Any, Any], Any],
        is_floating: Callable[[Any], bool],
    ) -> None:
        self.dtype = dtype
        self._cast = cast
        self._is_floating = is_floating

    def compress(self, tensor: Any) -> tuple[Any, Any]:  # type: ignore[override]
        if not self._is_floating(tensor):
            return tensor, None
        return self._cast(tensor, self.dtype), tensor.dtype

    def decompress(self, tensor: Any, ctx: Any) -> Any:  # type: ignore[override]
        return tensor if ctx is None else self._cast(tensor, ctx)


def describe(compressor: Any) -> str:
    """A compressor's name for people, equal on all ranks that use the same one."""
    if isinstance(compressor, CastCompressor):
        return compressor.dtype
    return str(getattr(compressor, "__name__", type(compressor).__name__))


class Compression:
    """The compressors of one framework: ``none`` and ``fp16`` (IEEE half precision).

    Stands for Horovod's class of the same name. Half precision keeps 11 bits of mantissa and
    overflows beyond 65,504, in the sum over ranks too.
    """

    def __init__(self, cast: Callable[[Any, Any], Any], is_floating: Callable[[Any], bool]) -> None:
        self.none = NoneCompressor
        self.fp16 = CastCompressor("float16", cast, is_floating)


def torch_compression(torch: ModuleType) -> Compression:
    """The compressors of PyTorch tensors."""

    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    return Compression(cast, torch.is_floating_point)


def tensorflow_compression(tf: ModuleType) -> Compression:
    """The compressors of TensorFlow tensors."""
    return Compression(tf.cast, lambda tensor: bool(tf.as_dtype(tensor.dtype).is_floating))
