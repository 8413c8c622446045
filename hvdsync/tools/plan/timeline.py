"""When buckets are ready and how long each travels in; when the step is over out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Of a step without communication; the optimizer counts with backward.
FORWARD = 1 / 3


@dataclass(frozen=True)
class Transfer:
    """A collective: ``delay`` seconds until it may start, which others may use; then ``busy``."""

    delay: float
    busy: float


@dataclass(frozen=True)
class Journey:
    """One bucket's way.

    ``ready`` is the share of backward after the bucket before that brings it; ``before`` is what
    its thread computes then, ``after`` what it computes with what has come.
    """

    ready: float
    before: float
    transfers: Sequence[Transfer]
    after: float


def step_seconds(compute: float, journeys: Sequence[Journey]) -> float:
    """Seconds of a step that computes for ``compute`` seconds.

    Buckets leave while backward still runs, one after the other. A bucket's second collective is
    started when its first is waited for, after backward. Where all buckets are small and cost
    nothing but their transfer, this comes to C / 3 + max(2 C / 3, M).
    """
    clock, free = FORWARD * compute, 0.0
    arrivals: list[float] = []
    for journey in journeys:
        clock += (1 - FORWARD) * compute * journey.ready + journey.before
        free = _travel(clock, free, journey.transfers[0])
        arrivals.append(free)
    for turn in range(1, max((len(journey.transfers) for journey in journeys), default=0)):
        for i, journey in enumerate(journeys):
            if turn < len(journey.transfers):
                clock = max(clock, arrivals[i])
                arrivals[i] = free = _travel(clock, free, journey.transfers[turn])
    for journey, arrival in zip(journeys, arrivals, strict=True):
        clock = max(clock, arrival) + journey.after
    return clock


def _travel(called: float, free: float, transfer: Transfer) -> float:
    return max(called + transfer.delay, free) + transfer.busy
