"""What ranks found in their gradients: one row of numbers per rank in, a report out.

Framework-free. Rows travel only in a step in which some rank saw something that may not be finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Of a tensor that is known not to be finite, while nobody counted how many elements are not.
UNCOUNTED = -1

# A rank's number; whether it saw its input, and how much of that was NaN or infinite; its loss.
_HEADER = 5
# Of each tensor: elements of this rank's gradient that are NaN, that are infinite, and elements of
# the reduced gradient that are either.
_COLUMNS = 3
_DATA_ADVICE = "Look at what that rank read and how it was prepared"
_SUM_ADVICE = (
    "Lower the loss scale or the learning rate, or let gradients travel uncompressed "
    "(half precision ends at 65,504, for the sum over ranks too)"
)
_ADVICE = (
    "Look for a division by zero, a logarithm or root of zero and an overflow in model and loss, "
    "lower the learning rate or warm it up"
)


@dataclass(frozen=True)
class Watched:
    """A tensor that has a gradient: its name, its dtype and shape, its number of elements."""

    name: str
    kind: str
    size: int


@dataclass(frozen=True)
class Report:
    """Why a step is not to be taken, in words, and what to do about it."""

    text: str
    advice: str


def row_length(tensors: int) -> int:
    """Numbers in one rank's row."""
    return _HEADER + _COLUMNS * tensors


def make_row(
    rank: int,
    inputs: tuple[int, int] | None,
    bad_loss: bool,
    local: np.ndarray,
    reduced: np.ndarray,
) -> np.ndarray:
    """What one rank found, as int64.

    ``inputs`` are NaN and infinite elements of its input, None if it was not seen. ``local`` (N, 2)
    counts NaN and infinite elements of its own gradients, or holds :data:`UNCOUNTED` twice;
    ``reduced`` (N) counts those of the reduced ones that are either.
    """
    header = [rank, inputs is not None, *(inputs or (0, 0)), bad_loss]
    table = np.concatenate([local, reduced[:, None]], 1)
    return np.concatenate([np.array(header, np.int64), table.reshape(-1).astype(np.int64)])


def report(
    rows: np.ndarray, tensors: Sequence[Watched], subject: str = "gradients"
) -> Report | None:
    """What all ranks' rows (ranks, :func:`row_length`) come to; None when everything is finite.

    The tensors are ``subject``.
    """
    found: list[str] = []
    bad_input = overflow = False
    for row in rows:
        inputs, bad_loss = row[1:4], bool(row[4])
        table = row[_HEADER:].reshape(-1, _COLUMNS)
        at = np.flatnonzero(table[:, 0] | table[:, 1])
        if not len(at) and not bad_loss:
            continue
        what = _describe(at, table, tensors) if len(at) else f"its {subject} are finite"
        loss = "a loss that is NaN or infinite, and " if bad_loss else ""
        found.append(f"rank {row[0]}: {loss}{what}; {_describe_input(inputs)}")
        bad_input |= bool(inputs[1] or inputs[2])
    reduced = rows[:, _HEADER:].reshape(len(rows), -1, _COLUMNS)[:, :, 2].max(0)
    if not found and reduced.any():
        overflow = True
        first = int(np.flatnonzero(reduced)[0])
        found.append(
            "those of every rank are, but their sum over ranks is not: it overflows in "
            f"{reduced[first]:,} of {tensors[first].size:,} elements of {_name(tensors[first])}"
        )
    if not found:
        return None
    advice = _DATA_ADVICE if bad_input else _SUM_ADVICE if overflow else _ADVICE
    return Report(f"{subject} are not finite: {'. '.join(found)}", advice)


def _describe(at: np.ndarray, table: np.ndarray, tensors: Sequence[Watched]) -> str:
    first = tensors[int(at[0])]
    nan, inf = (int(count) for count in table[at[0], :2])
    if nan == UNCOUNTED:
        text = f"{_name(first)} is not finite"
    else:
        text = f"{_counts(nan, inf)} of {first.size:,} elements in {_name(first)}"
    if len(at) == 1:
        return text
    return f"{text}, first of {len(at)} tensors that are not finite"


def _name(tensor: Watched) -> str:
    return f"{tensor.name!r} ({tensor.kind})"


def _describe_input(inputs: np.ndarray) -> str:
    seen, nan, inf = (int(value) for value in inputs)
    if not seen:
        return "its input was not seen"
    if not nan and not inf:
        return "its input was finite"
    return f"its input was bad already ({_counts(nan, inf)} elements)"


def _counts(nan: int, inf: int) -> str:
    kinds = [f"{nan:,} NaN"] * bool(nan) + [f"{inf:,} infinite"] * bool(inf)
    return " and ".join(kinds)
