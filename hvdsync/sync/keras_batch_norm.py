"""Batch normalisation with the statistics of all ranks' batches together, for Keras.

Written once for both backends: Keras and a differentiable sum over ranks go in, a layer comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hvdsync.comm import world
from hvdsync.sync.keras_disguise import saved_as


def make_sync_batch_normalization(
    keras: ModuleType, sum_over_ranks: Callable[[Any, str], Any]
) -> Any:
    """The layer class; ``sum_over_ranks(tensor, name)`` lets gradients through."""
    plain: Any = keras.layers.BatchNormalization
    ops = keras.ops

    class SyncBatchNormalization(plain):  # type: ignore[misc]
        """``keras.layers.BatchNormalization`` over the batches of all ranks (stands for Horovod's).

        Batches may differ in size between ranks: means are weighted. Arguments are those of Keras's
        layer; ``fused`` is accepted for compatibility and must be False. Runs on the CPU and on
        GPUs.

        On the wire, in each training step forward and again backward: 2 values per channel and one
        count. With one rank it is the plain layer. Saved models name the plain layer, so that they
        load without hvdsync; replace it again after loading to go on training.
        """

        __class__ = saved_as(plain)

        def __init__(self, fused: bool = False, **kwargs: Any) -> None:
            if fused in (True, None):
                raise ValueError("SyncBatchNormalization does not support fused=True.")
            if not kwargs.get("name"):
                number = keras.backend.get_uid("sync_batch_normalization")
                kwargs["name"] = f"sync_batch_normalization_{number}"
            plain.__init__(self, **kwargs)

        def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
            mean, variance = plain._moments(self, inputs, mask)
            if world.current().size == 1:
                return mean, variance
            if mask is None:
                shape = ops.shape(inputs)
                sizes = [ops.cast(shape[axis], mean.dtype) for axis in self._reduction_axes]
                count = ops.prod(ops.stack(sizes))
            else:
                count = ops.cast(ops.count_nonzero(mask), mean.dtype)
            # A rank's squares are taken from a point near its mean that all ranks share: taken from
            # zero, a variance much smaller than the mean's square would drown in rounding.
            near = ops.stop_gradient(ops.cast(self.moving_mean, mean.dtype))
            squares = variance + ops.square(mean - near)
            local = [mean * count, squares * count, ops.reshape(count, (1,))]
            total = sum_over_ranks(ops.concatenate(local), f"{self.name}.moments")
            channels = mean.shape[0]
            everyone_mean = total[:channels] / total[-1]
            everyone_square = total[channels:-1] / total[-1]
            return everyone_mean, everyone_square - ops.square(everyone_mean - near)

    return SyncBatchNormalization
