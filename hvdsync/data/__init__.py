"""In: a name or a path. Out: data sets as NumPy arrays, and which rank reads which sample of them.
Needs NumPy only; nothing is imported before it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdsync.data.arrays import Dataset as Dataset
    from hvdsync.data.arrays import to_float as to_float
    from hvdsync.data.datasets import load as load
    from hvdsync.data.gathering import gather_in_order as gather_in_order
    from hvdsync.data.sampler import DistributedSampler as DistributedSampler
    from hvdsync.data.seeds import rank_seed as rank_seed
    from hvdsync.data.workers import shard_files as shard_files
    from hvdsync.data.workers import worker_shard as worker_shard

_HOME = {
    "Dataset": "hvdsync.data.arrays",
    "to_float": "hvdsync.data.arrays",
    "load": "hvdsync.data.datasets",
    "gather_in_order": "hvdsync.data.gathering",
    "DistributedSampler": "hvdsync.data.sampler",
    "rank_seed": "hvdsync.data.seeds",
    "shard_files": "hvdsync.data.workers",
    "worker_shard": "hvdsync.data.workers",
}

__all__ = [
    "Dataset",
    "DistributedSampler",
    "gather_in_order",
    "load",
    "rank_seed",
    "shard_files",
    "to_float",
    "worker_shard",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
