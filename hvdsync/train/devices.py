"""Which device a rank computes on: how many GPUs its node has in, an index or the CPU out.

Chosen without a word between ranks, since TensorFlow must know before its first operation, and
agreed upon after.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from hvdsync.comm import launch, verbs
from hvdsync.errors import HvdsyncError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Device:
    """The GPU of a rank, or None for the CPU; then ``shortage`` says why, if it was not wished."""

    gpu: int | None
    shortage: str = ""


def choose(wanted: Literal["auto", "cpu", "cuda"], gpus: int) -> Device:
    """The device of this rank, of a node where it sees ``gpus`` GPUs: the one of its local rank.

    The CPU, on the whole node, when it has fewer GPUs than ranks.
    """
    if wanted == "cpu":
        return Device(None)
    ranks = verbs.local_size()
    if gpus >= ranks:
        return Device(verbs.local_rank())
    found = "no GPU is found" if gpus == 0 else f"{gpus} GPU(s) are found"
    return Device(None, f"{found} on a node that runs {ranks} rank(s), and each needs its own")


def agree(wanted: Literal["auto", "cpu", "cuda"], device: Device) -> None:
    """Check the choices of all ranks; one all-gather.

    Raises :class:`HvdsyncError` on every rank when ``"cuda"`` was wanted and a node is short of
    GPUs, or when only some nodes are: ranks must meet on one kind of device. Otherwise rank 0 logs
    a shortage, unless there is no GPU at all. In an elastic job, where a worker that joins would
    ask alone, each node decides for itself.
    """
    if launch.is_elastic():
        if wanted == "cuda" and device.shortage is not None:
            raise HvdsyncError(f"--device cuda: {device.shortage}; give --device cpu")
        return
    shortages = verbs.allgather_object(device.shortage, "hvdsync.train.devices")
    short = next((text for text in shortages if text), None)
    if short is None:
        return
    if wanted == "cuda" or not all(shortages):
        raise HvdsyncError(
            f"--device {wanted}: {short}; start at most one rank per GPU, or give --device cpu"
        )
    if verbs.rank() == 0 and not short.startswith("no GPU"):
        logger.warning("%s: all ranks compute on the CPU", short)
