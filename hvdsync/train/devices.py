"""Which device a rank computes on: how many GPUs its node has in, an index or the CPU out."""

from __future__ import annotations

import logging
from typing import Literal

from hvdsync.comm import verbs
from hvdsync.errors import HvdsyncError

logger = logging.getLogger(__name__)


def choose_gpu(wanted: Literal["auto", "cpu", "cuda"], gpus: int) -> int | None:
    """The index of this rank's GPU, or None for the CPU: the same kind of device on all ranks.

    ``gpus`` is how many this process sees. A rank takes the GPU of its local rank. When a node has
    fewer GPUs than ranks, ``"auto"`` takes the CPU everywhere and says so, and ``"cuda"`` raises
    :class:`HvdsyncError` on every rank. One all-gather.
    """
    if wanted == "cpu":
        return None
    local_rank, local_size = verbs.local_rank(), verbs.local_size()
    nodes = verbs.allgather_object((gpus, local_size), "hvdsync.train.devices")
    worst = min(nodes, key=lambda node: node[0] - node[1])
    if worst[0] >= worst[1]:
        return local_rank
    found = "no GPU is found" if worst[0] == 0 else f"{worst[0]} GPU(s) are found"
    shortage = f"{found} on a node that runs {worst[1]} rank(s), and each rank needs its own"
    if wanted == "cuda":
        raise HvdsyncError(
            f"--device cuda: {shortage}; start at most one rank per GPU, or give --device cpu"
        )
    if any(count for count, _ in nodes) and verbs.rank() == 0:
        logger.warning("%s: all ranks compute on the CPU", shortage)
    return None
