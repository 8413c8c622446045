"""``Compression`` for TensorFlow tensors: the shared compressors with TensorFlow's casts."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdsync.sync.compression import make_compression


def _cast(tensor: Any, dtype: Any) -> Any:
    return tf.cast(tensor, dtype)


def _is_floating(tensor: Any) -> bool:
    return bool(tf.as_dtype(tensor.dtype).is_floating)


Compression = make_compression(_cast, _is_floating)
