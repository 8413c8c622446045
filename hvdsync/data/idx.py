"""In: bytes or a file in the IDX format of the MNIST pages. Out: a uint8 array, and the way back.
The format: two zero bytes, a type (8: uint8), the number of sizes, the sizes as big-endian uint32.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdsync.errors import DataError

_UINT8 = 0x08


def encode_idx(array: npt.NDArray[np.uint8]) -> bytes:
    """The array as the bytes of an IDX file."""
    header = struct.pack(f">HBB{array.ndim}I", 0, _UINT8, array.ndim, *array.shape)
    return header + array.tobytes()


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The uint8 array in an IDX file; ``DataError`` where its header and its size disagree."""
    data: npt.NDArray[Any] = np.fromfile(path, dtype=np.uint8)
    head = bytes(data[:4])
    if len(head) < 4 or head[:3] != b"\0\0\x08" or len(data) < 4 + 4 * head[3]:
        raise DataError(
            f"{path}: found the first bytes {head.hex(' ')}, expected an IDX file of uint8"
        )
    start = 4 + 4 * head[3]
    shape = struct.unpack(f">{head[3]}I", bytes(data[4:start]))
    expected = int(np.prod(shape, dtype=np.int64))
    if len(data) - start != expected:
        raise DataError(f"{path}: found {len(data) - start} bytes, expected {expected} for {shape}")
    return data[start:].reshape(shape)
