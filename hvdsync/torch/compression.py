"""``Compression`` for PyTorch tensors: the shared compressors with PyTorch's casts."""

from __future__ import annotations

from typing import Any

import torch

from hvdsync.sync.compression import make_compression


def _cast(tensor: torch.Tensor, dtype: Any) -> torch.Tensor:
    return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


Compression = make_compression(_cast, torch.is_floating_point)
