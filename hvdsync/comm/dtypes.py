"""What a dtype is called: one of any framework in, the name that all of them share out."""

from __future__ import annotations

from typing import Any


def dtype_name(dtype: Any) -> str:
    """``"float32"`` of NumPy's, PyTorch's, TensorFlow's and Keras's dtype of that name."""
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")
