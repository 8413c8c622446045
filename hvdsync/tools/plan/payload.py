"""A model's gradients and a compression in; buckets and what collectives carry of each out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvdsync.sync.buckets import plan_buckets
from hvdsync.sync.compression.choices import parse
from hvdsync.sync.compression.exchange import Part
from hvdsync.sync.compression.onebit import OneBit
from hvdsync.sync.compression.powersgd import PowerSGD, as_matrix
from hvdsync.sync.compression.topk import TopK

_FLOAT32 = 4


@dataclass(frozen=True)
class Leg:
    """A collective: its kind, and the bytes that each worker gives to it."""

    kind: str
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """Gradients in float32 that travel together, and the flags behind them."""

    parts: tuple[Part, ...]

    @property
    def flags(self) -> int:
        """Two for each gradient and two for the bucket; they travel as elements do."""
        return 2 * len(self.parts) + 2

    @property
    def elements(self) -> int:
        """With the flags."""
        return sum(part.size for part in self.parts) + self.flags

    @property
    def nbytes(self) -> int:
        """Uncompressed."""
        return _FLOAT32 * self.elements

    def legs(self, compression: str, workers: int) -> list[Leg]:
        """What travels of it, one collective after the other, as docs/compression.md has it."""
        name, compressor = parse(compression)
        elements = self.elements
        if name == "none":
            return [Leg("sum", _FLOAT32 * elements)]
        if name == "fp16":
            return [Leg("sum", 2 * elements)]
        if name == "bf16":
            share = 2 * math.ceil(elements / workers)
            return [Leg("alltoall", share * workers), Leg("gather", share)]
        assert isinstance(compressor, OneBit | PowerSGD | TopK)
        large = [part for part in self.parts if compressor.compresses(part.shape)]
        whole = _FLOAT32 * (elements - sum(part.size for part in large))
        if isinstance(compressor, PowerSGD):
            sizes = [as_matrix(part.shape) for part in large]
            columns_wide = _FLOAT32 * compressor.rank
            first = Leg("sum", whole + columns_wide * sum(rows for rows, _ in sizes))
            second = Leg("sum", columns_wide * sum(columns for _, columns in sizes))
            return [first, second] if large else [first]
        if isinstance(compressor, TopK):
            sent = sum(2 * _FLOAT32 * compressor.count(part.size) for part in large)
        else:
            sent = sum(-(-part.size // 8) + _FLOAT32 for part in large)
        return [Leg("gather", whole + sent)]


def buckets_of(shapes: Sequence[tuple[int, ...]]) -> list[Bucket]:
    """The buckets of parameters of these shapes, those of the last ones first."""
    parts = [Part(str(i), shape) for i, shape in reversed(list(enumerate(shapes)))]
    plan = plan_buckets([part.size for part in parts], ["float32"] * len(parts))
    return [Bucket(tuple(parts[m] for m in bucket.members)) for bucket in plan]


def sent_on_network(legs: Sequence[Leg], workers: int) -> float:
    """Bytes that a worker sends for these collectives, around rings."""
    shares = {
        "sum": 2 * (workers - 1) / workers,
        "gather": workers - 1,
        "alltoall": (workers - 1) / workers,
    }
    return sum(shares[leg.kind] * leg.nbytes for leg in legs)
