"""Batch normalisation with the statistics of all ranks' batches together.

A layer's inputs of this rank go in; mean and variance over the global batch normalise them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdsync.comm import horovod as _horovod
from hvdsync.comm import world
from hvdsync.tensorflow.collectives import allreduce

hvd = _horovod.load("tensorflow")


class SyncBatchNormalization(tf.keras.layers.BatchNormalization):
    """``keras.layers.BatchNormalization`` over the batches of all ranks (stands for Horovod's).

    Batches may differ in size between ranks: means are weighted. Arguments are those of Keras's
    layer; ``fused`` is accepted for compatibility and must be False. Runs on the CPU and on GPUs.

    On the wire, in each training step forward and again backward: 2 values per channel and one
    count. With one rank it is the plain layer. Saved models name the plain layer, so that they
    load without hvdsync; replace it again after loading to go on training.
    """

    # Keras writes down obj.__class__ when it saves. (super() would look it up, see calls below.)
    __class__ = property(lambda self: tf.keras.layers.BatchNormalization)  # type: ignore[assignment]

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        if not kwargs.get("name"):
            kwargs["name"] = tf.keras.backend.get_uid("sync_batch_normalization")
            kwargs["name"] = f"sync_batch_normalization_{kwargs['name']}"
        tf.keras.layers.BatchNormalization.__init__(self, **kwargs)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = tf.keras.layers.BatchNormalization._moments(self, inputs, mask)
        if world.current().size == 1:
            return mean, variance
        if mask is None:
            axes = [axis for axis, _ in enumerate(inputs.shape) if axis in self._reduction_axes]
            count = tf.reduce_prod(tf.gather(tf.shape(inputs), axes))
        else:
            count = tf.math.count_nonzero(mask)
        count = tf.cast(count, mean.dtype)
        # Var[X] = E[X^2] - E[X]^2, with each rank's expectation weighted by its count.
        local = tf.concat([mean * count, (variance + tf.square(mean)) * count, [count]], 0)
        total = allreduce(local, op=hvd.Sum, name=f"{self.name}.moments", ignore_name_scope=True)
        size = tf.size(mean)
        global_mean = total[:size] / total[-1]
        global_variance = total[size:-1] / total[-1] - tf.square(global_mean)
        return global_mean, global_variance
