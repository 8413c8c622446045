"""Batch normalisation over the batches of all ranks, on whichever backend Keras runs."""

from __future__ import annotations

from typing import Any

import keras

from hvdsync.keras._backend import backend
from hvdsync.sync.keras_batch_norm import make_sync_batch_normalization

SyncBatchNormalization: Any = make_sync_batch_normalization(keras, backend.sum_over_ranks)
