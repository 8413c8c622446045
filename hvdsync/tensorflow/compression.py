"""``Compression`` for TensorFlow tensors."""

import tensorflow as tf

from hvdsync.sync.compression import tensorflow_compression

Compression = tensorflow_compression(tf)
