"""Batch normalisation over the batches of all ranks, for Keras layers on TensorFlow."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from hvdsync.comm import horovod as _horovod
from hvdsync.sync.keras_batch_norm import make_sync_batch_normalization
from hvdsync.sync.tensorflow_reducer import sum_over_ranks

hvd = _horovod.load("tensorflow")

SyncBatchNormalization: Any = make_sync_batch_normalization(
    keras, lambda tensor, name: sum_over_ranks(tf, hvd, tensor, name)
)
