"""Which of many cases run without MATRIX=1: lists of values in, parameters for pytest out."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thinned(*lists: Iterable[Any]) -> list[Any]:
    """All combinations of values; all are of the matrix but a few, in which each value occurs."""
    values = [list(each) for each in lists]
    longest = max(map(len, values))
    quick = {tuple(i % len(each) for each in values) for i in range(longest)}
    return [
        pytest.param(
            *(each[i] for each, i in zip(values, places, strict=True)),
            marks=() if places in quick else pytest.mark.matrix,
        )
        for places in itertools.product(*(range(len(each)) for each in values))
    ]


def matrix_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """All values, or tuples of them; those that are not among the quick ones are of the matrix."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in quick else pytest.mark.matrix,
        )
        for value in values
    ]
