"""Comparison of replicas: entries of this rank go in, the first difference between ranks comes out.

Collective, with 17 bytes a rank on the wire as long as replicas are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hvdsync.comm import trees, verbs, world
from hvdsync.comm.comparison import listed
from hvdsync.errors import HvdsyncError, ReplicaMismatch
from hvdsync.guard.fingerprints import DIGEST_BYTES, Entry, Fingerprint, combine, fingerprint

_ABSENT = "none"
_STATISTICS = ("running_", "moving_")
_STATISTICS_ADVICE = (
    "If these are statistics of batch normalisation, each rank has those of its own batches: use "
    "the synchronised layer, or name them in ignore="
)
_ADVICE = (
    "Look for what changes the model on some ranks only (a plain optimizer, code under "
    "rank() == 0, a faulty device), go back to a checkpoint"
)


@dataclass(frozen=True)
class Difference:
    """The first tensor that is not equal on all ranks.

    ``ranks`` are those that differ from ``majority``, the ranks that agree with ``source``:
    the lowest rank of the majority, whose values a repair spreads.
    """

    name: str
    ranks: tuple[int, ...]
    majority: tuple[int, ...]
    source: int
    text: str


def compare(list_entries: Callable[[], Sequence[Entry]]) -> Difference | None:
    """What differs between the replicas of all ranks, the same on all of them; None if nothing.

    On the wire: one all-gather of 17 bytes a rank. Only when replicas differ, the names, kinds and
    fingerprints of all tensors follow, pickled, and the one tensor that is reported.

    Raises, on every rank, what ``list_entries`` raises on one: there as it is, elsewhere as
    ``HvdsyncError``.
    """
    comm = world.current()
    if comm.size == 1:
        return None
    entries: Sequence[Entry] = ()
    found: list[Fingerprint] = []
    failure: Exception | None = None
    try:
        entries = list_entries()
        found = [fingerprint(entry) for entry in entries]
    except Exception as error:  # the other ranks wait for this one's digest
        failure = error
    mine = np.frombuffer(combine(found) + bytes([failure is not None]), np.uint8)
    everyone = comm.allgather(mine, "hvdsync.replicas.digest").reshape(comm.size, -1)
    if everyone[:, DIGEST_BYTES].any():
        verbs.raise_on_all(
            failure,
            "replicas cannot be compared, because their state cannot be read everywhere",
            "hvdsync.replicas.failure",
        )
    if (everyone == everyone[0]).all():
        return None
    return _locate(entries, found)


def check(list_entries: Callable[[], Sequence[Entry]]) -> None:
    """Raise :class:`ReplicaMismatch` on every rank when :func:`compare` finds a difference."""
    difference = compare(list_entries)
    if difference is not None:
        raise mismatch(difference)


def between_meetings() -> HvdsyncError:
    """The error of a comparison while an update rule lets replicas differ; alike on all ranks."""
    return HvdsyncError(
        f"rank {verbs.rank()} of {verbs.size()}: replicas are not meant to be equal now, since "
        "each rank takes steps alone between two meetings; call optimizer.synchronize_replicas() "
        "before they are compared"
    )


def mismatch(difference: Difference) -> ReplicaMismatch:
    """The error that names a difference, and what to do."""
    statistics = any(kind in difference.name for kind in _STATISTICS)
    return ReplicaMismatch(
        f"rank {verbs.rank()} of {verbs.size()}: {difference.text}; expected equal bits on every "
        f"rank. {_STATISTICS_ADVICE if statistics else _ADVICE}, or let "
        'Guard(on_divergence="repair") make replicas equal'
    )


def _locate(entries: Sequence[Entry], found: list[Fingerprint]) -> Difference:
    tables: list[dict[str, Fingerprint]] = [
        {one.key: one for one in theirs}
        for theirs in verbs.allgather_object(found, "hvdsync.replicas.fingerprints")
    ]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    majorities = {key: _majority([_value(table, key) for table in tables]) for key in keys}
    unequal = [key for key in keys if len(majorities[key]) < len(tables)]
    # Of several ranks with something of their own, the one that most others agree with.
    source = max(
        range(len(tables)), key=lambda r: (sum(r in majorities[key] for key in unequal), -r)
    )
    first = unequal[0]
    majority = majorities[first]
    others = tuple(r for r in range(len(tables)) if r not in majority)
    name = next(table[first].name for table in tables if first in table)
    text = _describe(first, name, tables, majority, others, entries)
    if len(unequal) > 1:
        text += f" ({len(unequal)} of {len(keys)} differ in all)"
    return Difference(name, others, majority, source, text)


def _value(table: dict[str, Fingerprint], key: str) -> tuple[str, bytes]:
    return (table[key].kind, table[key].digest) if key in table else (_ABSENT, b"")


def _majority(values: list[tuple[str, bytes]]) -> tuple[int, ...]:
    """The ranks of the most frequent value; of equally frequent ones that of the lowest rank."""
    winner, _ = Counter(values).most_common(1)[0]
    return tuple(rank for rank, value in enumerate(values) if value == winner)


def _describe(
    key: str,
    name: str,
    tables: list[dict[str, Fingerprint]],
    majority: tuple[int, ...],
    others: tuple[int, ...],
    entries: Sequence[Entry],
) -> str:
    kinds = [_value(table, key)[0] for table in tables]
    against = (
        f"the majority ({listed(majority)})"
        if 2 * len(majority) > len(tables)
        else f"{listed(majority)} (there is no majority)"
    )
    who = f"{listed(others)} {'differs' if len(others) == 1 else 'differ'} from {against}"
    if len(set(kinds)) > 1:
        seen = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        return f"replicas differ in kind in {name!r}: {who}; found {seen}"
    entry = next(entry for entry in entries if entry.key == key)
    by = _by_how_much(entry, majority[0], others)
    return f"replicas differ in {name!r} ({kinds[0]}): {who}{by}"


def _by_how_much(entry: Entry, root: int, others: tuple[int, ...]) -> str:
    """Broadcast the numbers of one rank, and say how far the others' are from them."""
    own = entry.numbers()
    if own is None:
        shown = verbs.allgather_object(entry.bits().tobytes()[:80], "hvdsync.replicas.text")
        seen = (f"rank {r}: {text.decode(errors='replace')}" for r, text in enumerate(shown))
        return f"; found {', '.join(seen)}"
    expected = np.array(own, order="C")
    trees.broadcast_buffers([expected.reshape(-1).view(np.uint8)], root, "hvdsync.replicas.tensor")
    measured = verbs.allgather_object(_distance(own, expected), "hvdsync.replicas.distance")
    if own.ndim == 0:
        seen = (f"rank {r} {measured[r][2]}" for r in (root, *others))
        return f"; found {', '.join(seen)}"
    parts = []
    for rank in others:
        count, distance, _ = measured[rank]
        size = f"in {count:,} of {own.size:,} elements, by at most {distance:.6g}"
        parts.append(f"rank {rank} {size}" if count else f"rank {rank} in bits of equal numbers")
    return f": {', '.join(parts)}"


def _distance(own: np.ndarray, expected: np.ndarray) -> tuple[int, float, str]:
    """(elements that differ, the greatest absolute difference, the value itself if it is one)."""
    unequal = own != expected
    if own.dtype.kind in "fc":
        unequal &= ~(np.isnan(own) & np.isnan(expected))
    a, b = own[unequal], expected[unequal]
    if a.dtype.kind != "c":
        a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        greatest = float(np.max(np.abs(a - b))) if a.size else 0.0
    return int(np.count_nonzero(unequal)), greatest, repr(own.item()) if own.ndim == 0 else ""
