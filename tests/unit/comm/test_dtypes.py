"""One name for the same dtype of every framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdsync.comm.dtypes import dtype_name


def of_numpy(name: str) -> Any:
    return np.dtype(name)


def of_torch(name: str) -> Any:
    return getattr(pytest.importorskip("torch"), name)


def of_tensorflow(name: str) -> Any:
    return getattr(pytest.importorskip("tensorflow"), name)


@pytest.mark.parametrize("made", [of_numpy, of_torch, of_tensorflow, str])
def test_a_dtype_has_the_same_name_in_every_framework(made: Any) -> None:
    names = ["float32", "float16", "int64", "uint8"]
    assert [dtype_name(made(name)) for name in names] == names
