"""Starting and stopping Horovod for TensorFlow, and who this process is in the run."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from hvdsync.comm import horovod as _horovod
from hvdsync.comm import verbs, world

hvd = _horovod.load("tensorflow")


def _to_tensor(array: np.ndarray) -> Any:
    # On the host: what ranks say to one another is no work for an accelerator.
    with tf.device("CPU:0"):
        return tf.constant(array)


def init(*args: Any, **kwargs: Any) -> None:
    """Start Horovod for TensorFlow; arguments are those of Horovod's ``init`` (``comm``,
    ``process_sets``). With no launcher it starts a world of one.

    Raises ``LaunchError`` when the launcher started more ranks than Horovod sees.
    """
    _horovod.start(hvd, _to_tensor, lambda tensor: tensor.numpy(), *args, **kwargs)


def shutdown() -> None:
    """Stop Horovod; afterwards this process is a world of one until the next ``init``."""
    _horovod.stop(hvd)


def cross_rank() -> int:
    """Index of this host among those that have a process of this local rank; 0 before ``init``."""
    return hvd.cross_rank() if world.is_active() else _alone(0)


def cross_size() -> int:
    """Number of hosts that have a process of this local rank; 1 before ``init``."""
    return hvd.cross_size() if world.is_active() else _alone(1)


def is_homogeneous() -> bool:
    """Whether all hosts run equally many ranks; True before ``init``."""
    return hvd.is_homogeneous() if world.is_active() else bool(_alone(1))


def _alone(value: int) -> int:
    verbs.size()  # raises when a launcher started several ranks
    return value
