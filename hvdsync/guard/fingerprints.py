"""Fingerprints of tensors: named values of this rank go in, 16 bytes for each of them come out.

Equal fingerprints mean equal bits; a single flipped bit anywhere changes its tensor's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import xxhash

from hvdsync.comm.dtypes import dtype_name

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Entry:
    """One value that replicas share, read only when it is needed.

    ``key`` is what finds it on other ranks, where its ``name`` may be another one; ``kind`` is its
    dtype and shape. ``bits()`` gives its memory as a contiguous array of any dtype on the host,
    ``numbers()`` a copy that can be subtracted, or None for what is no number.
    """

    key: str
    name: str
    kind: str
    bits: Callable[[], np.ndarray]
    numbers: Callable[[], np.ndarray | None]


@dataclass(frozen=True)
class Fingerprint:
    """What is compared of an entry: ``kind`` and ``digest`` are equal where replicas are."""

    key: str
    name: str
    kind: str
    digest: bytes


def kind_of(tensor: Any) -> str:
    """Dtype and shape of any framework's tensor or variable, in words."""
    return f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"


def fingerprint(entry: Entry) -> Fingerprint:
    """XXH3 with 128 bits over the memory: as fast as memory is read, so ten times a SHA's pace."""
    bits = entry.bits()
    digest = xxhash.xxh3_128_digest(bits.reshape(-1).view(np.uint8).data)
    return Fingerprint(entry.key, entry.name, entry.kind, digest)


def combine(fingerprints: Iterable[Fingerprint]) -> bytes:
    """One digest of 16 bytes for all of them in any order; names, which may differ, left out."""
    together = xxhash.xxh3_128()
    for one in sorted(fingerprints, key=lambda f: f.key):
        together.update(f"{one.key}\0{one.kind}\0".encode())
        together.update(one.digest)
    return together.digest()


def array_entry(key: str, name: str, kind: str, read: Callable[[], np.ndarray]) -> Entry:
    """The entry of a NumPy array that ``read`` gives; also of dtypes that extend NumPy's."""
    return Entry(
        key, name, kind, lambda: np.ascontiguousarray(read()), lambda: _subtractable(read())
    )


def plain_entry(name: str, value: Any) -> Entry:
    """The entry of a Python value: a number as one of 64 bits, anything else as its ``repr``."""
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63):
        number = np.array(value)
        return array_entry(name, name, number.dtype.name, lambda: number)
    text = np.frombuffer(repr(value).encode(), np.uint8)
    return Entry(name, name, type(value).__name__, lambda: text, lambda: None)


def flatten(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts, lists and tuples under dotted names."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from flatten(f"{name}.{key}", child)
    elif isinstance(value, list | tuple):
        for i, child in enumerate(value):
            yield from flatten(f"{name}.{i}", child)
    else:
        yield name, value


def without(entries: Iterable[Entry], ignore: Iterable[str]) -> list[Entry]:
    """The entries whose names match none of the shell patterns."""
    patterns = [ignore] if isinstance(ignore, str) else list(ignore)
    return [e for e in entries if not any(fnmatchcase(e.name, pattern) for pattern in patterns)]


def _subtractable(array: np.ndarray) -> np.ndarray | None:
    if array.dtype.kind in "fc":
        return np.array(array)
    if array.dtype.kind in "biu":
        return array.astype(np.uint8 if array.dtype.kind == "b" else array.dtype)
    try:
        return array.astype(np.float32)  # bfloat16 and its kind
    except (TypeError, ValueError):
        return None
