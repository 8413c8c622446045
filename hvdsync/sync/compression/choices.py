"""``Compression`` of a front door: the compressors by name, for code and for a command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from hvdsync.sync.compression.casts import BrainFloat, HalfPrecision
from hvdsync.sync.compression.compressor import NoneCompressor
from hvdsync.sync.compression.exchange import BucketCompressor
from hvdsync.sync.compression.onebit import OneBit
from hvdsync.sync.compression.powersgd import PowerSGD
from hvdsync.sync.compression.topk import TopK

_OF_TENSORS = ("none", "fp16", "bf16")
_OF_BUCKETS: dict[str, type[BucketCompressor]] = {
    "powersgd": PowerSGD,
    "topk": TopK,
    "onebit": OneBit,
}


class Compression:
    """The compressors of one framework; ``none`` and ``fp16`` stand for Horovod's.

    ``none``, ``fp16``, ``bf16`` and ``onebit`` are given as they are, ``powersgd(rank=4,
    start_step=0)`` and ``topk(ratio=0.01, momentum=0.0)`` are called. See docs/compression.md for
    what each sends.
    """

    powersgd = PowerSGD
    topk = TopK

    def __init__(self, cast: Callable[[Any, Any], Any], is_floating: Callable[[Any], bool]) -> None:
        self.none = NoneCompressor
        self.fp16 = HalfPrecision(cast, is_floating)
        self.bf16 = BrainFloat(cast, is_floating)
        self.onebit = OneBit()

    def named(self, text: str) -> Any:
        """The compressor of ``"none"``, ``"topk:0.01"``, ``"powersgd:4,1000"``, ...

        Raises ``ValueError`` as :func:`parse`.
        """
        name, compressor = parse(text)
        return getattr(self, name) if compressor is None else compressor


def parse(text: str) -> tuple[str, BucketCompressor | None]:
    """A name, and its compressor unless each framework has its own.

    Raises ``ValueError`` for a name that does not exist and for arguments that do not fit.
    """
    name, colon, rest = text.partition(":")
    kind = _OF_BUCKETS.get(name)
    if kind is None:
        if name not in _OF_TENSORS:
            listed = ", ".join([*_OF_TENSORS, *_OF_BUCKETS])
            raise ValueError(f"compression is {text!r}; expected one of {listed}")
        parameters = []
    else:
        parameters = list(inspect.signature(kind).parameters.values())
    if colon and not parameters:
        raise ValueError(f"compression is {text!r}, but {name} takes no argument")
    if kind is None:
        return name, None
    given = rest.split(",") if colon else []
    form = ",".join(parameter.name for parameter in parameters)
    if len(given) > len(parameters):
        raise ValueError(f"compression is {text!r}; expected {name}:{form}, or less of it")
    try:
        values = [type(p.default)(part) for p, part in zip(parameters, given, strict=False)]
    except ValueError:
        raise ValueError(f"compression is {text!r}; expected numbers, {name}:{form}") from None
    return name, kind(*values)


def without_framework(text: str) -> Any:
    """The compressor of a text, for questions before a framework is there; it compresses nothing.

    Raises ``ValueError`` as :func:`parse`.
    """

    def absent(*_: Any) -> Any:
        raise RuntimeError(f"compression {text} was made without a framework")

    return Compression(absent, absent).named(text)


def torch_compression(torch: ModuleType) -> Compression:
    """The compressors of PyTorch tensors."""

    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    return Compression(cast, torch.is_floating_point)


def tensorflow_compression(tf: ModuleType) -> Compression:
    """The compressors of TensorFlow tensors."""
    return Compression(tf.cast, lambda tensor: bool(tf.as_dtype(tensor.dtype).is_floating))
