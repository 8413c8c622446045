"""What travels in place of a tensor, element for element: a tensor in, a smaller one out.

Horovod's interface, which scripts implement too; whole buckets are for ``exchange.py``.
"""

from __future__ import annotations

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


def describe(compressor: Any) -> str:
    """A compressor's name for people, equal on all ranks that use the same one."""
    if isinstance(compressor, type):
        return compressor.__name__
    own = getattr(compressor, "description", None)
    return str(own or getattr(compressor, "__name__", type(compressor).__name__))
