"""What travels in place of gradients: one file per method, an adapter per framework.

A front door hands in its framework and gets its ``Compression``; a reducer hands in buckets.
"""

from hvdsync.sync.compression.casts import CastCompressor
from hvdsync.sync.compression.choices import Compression, parse, torch_compression
from hvdsync.sync.compression.choices import tensorflow_compression as tensorflow_compression
from hvdsync.sync.compression.compressor import Compressor, NoneCompressor, describe

__all__ = [
    "CastCompressor",
    "Compression",
    "Compressor",
    "NoneCompressor",
    "describe",
    "parse",
    "tensorflow_compression",
    "torch_compression",
]
