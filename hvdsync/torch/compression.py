"""``Compression`` for PyTorch tensors."""

import torch

from hvdsync.sync.compression import torch_compression

Compression = torch_compression(torch)
