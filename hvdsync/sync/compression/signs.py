"""Signs as bits: eight of them in a byte, and the eight that a byte stands for."""

from __future__ import annotations

import functools

import numpy as np

GATHERING = 0x0102040810204080
"""Times eight bytes that are 0 or 1, in a number of 64 bits: its top byte has a bit of each."""


@functools.cache
def signs_of_bytes(dtype: str) -> np.ndarray:
    """(256, 8): for each byte that :data:`GATHERING` makes the 1 or -1 of each bit."""
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    return (2 * bits - 1).astype(dtype)
