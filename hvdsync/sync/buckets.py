"""Which gradients travel together: sizes and dtypes go in, a plan of buckets comes out.

The plan depends on nothing but its arguments, so equal arguments give every rank the same plan.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

# A first bucket that is ready early starts the wire while backward still runs; later ones are
# larger because each collective costs a fixed time besides its bytes.
DEFAULT_LIMIT_BYTES = 4 * 2**20
DEFAULT_FIRST_BYTES = 1 * 2**20


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype that are reduced as one flat array.

    ``members`` are positions in the sequences given to :func:`plan_buckets`; ``sizes`` are their
    numbers of elements, in the same order.
    """

    dtype: str
    members: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def length(self) -> int:
        """Number of elements of the flat array."""
        return sum(self.sizes)


def plan_buckets(
    sizes: Sequence[int],
    dtypes: Sequence[str],
    *,
    limit_bytes: int = DEFAULT_LIMIT_BYTES,
    first_bytes: int | None = DEFAULT_FIRST_BYTES,
    groups: Sequence[Sequence[int]] | None = None,
) -> tuple[Bucket, ...]:
    """Cut tensors, given in the order in which they become ready, into buckets.

    ``sizes`` are element counts and ``dtypes`` NumPy-style names (``float32``, ``bfloat16``).
    A bucket holds consecutive tensors of one dtype up to ``limit_bytes`` (the first one up to
    ``first_bytes``, when given); a tensor larger than that has a bucket of its own. With
    ``groups``, each group of positions is one bucket per dtype, whatever its size, and the
    positions that no group names are cut as above.
    """
    plan: list[Bucket] = []
    grouped: set[int] = set()
    for group in groups or ():
        grouped.update(group)
        for dtype in dict.fromkeys(dtypes[i] for i in group):
            members = tuple(i for i in group if dtypes[i] == dtype)
            plan.append(Bucket(dtype, members, tuple(sizes[i] for i in members)))

    open_members: dict[str, list[int]] = {}
    open_bytes: dict[str, int] = {}
    started: set[str] = set()

    def close(dtype: str) -> None:
        members = tuple(open_members.pop(dtype))
        plan.append(Bucket(dtype, members, tuple(sizes[i] for i in members)))
        started.add(dtype)

    for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        if i in grouped:
            continue
        nbytes = size * itemsize(dtype)
        limit = limit_bytes if first_bytes is None or dtype in started else first_bytes
        if dtype in open_members and open_bytes[dtype] + nbytes > limit:
            close(dtype)
        if dtype not in open_members:
            open_members[dtype], open_bytes[dtype] = [], 0
        open_members[dtype].append(i)
        open_bytes[dtype] += nbytes
    for dtype in list(open_members):
        close(dtype)
    return tuple(plan)


def group_positions(
    groups: int | Sequence[Sequence[Hashable]] | None, keys: Sequence[Hashable]
) -> tuple[tuple[int, ...], ...] | None:
    """A user's ``groups`` as positions in ``keys``, as :func:`plan_buckets` takes them.

    ``groups`` are lists of keys, of which those not in ``keys`` are left out, or a number of
    groups of consecutive keys.
    """
    if groups is None:
        return None
    if isinstance(groups, int):
        count = min(groups, len(keys))
        bounds = [round(i * len(keys) / count) for i in range(count + 1)]
        return tuple(tuple(range(a, b)) for a, b in pairwise(bounds))
    positions = {key: i for i, key in enumerate(keys)}
    return tuple(tuple(positions[k] for k in group if k in positions) for group in groups)


def itemsize(dtype: str) -> int:
    """Bytes of one element; ``bfloat16``, which NumPy does not know, included."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
