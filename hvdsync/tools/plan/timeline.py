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
    started when a later bucket leaves and finds the first one over, or else when that is waited
    for, after backward. Where all buckets are small and cost nothing but their transfer, this comes
    to C / 3 + max(2 C / 3, M).
    """
    clock, free = FORWARD * compute, 0.0
    arrivals: list[float] = []
    started: list[int] = []

    def start_next(i: int) -> None:
        nonlocal free
        arrivals[i] = free = _travel(clock, free, journeys[i].transfers[started[i]])
        started[i] += 1

    def has_next(i: int) -> bool:
        return started[i] < len(journeys[i].transfers)

    for i, journey in enumerate(journeys):
        clock += (1 - FORWARD) * compute * journey.ready + journey.before
        arrivals.append(0.0)
        started.append(0)
        start_next(i)
        for earlier in range(i):
            if has_next(earlier) and arrivals[earlier] <= clock:
                start_next(earlier)
    while under_way := [i for i in range(len(journeys)) if has_next(i)]:
        for i in under_way:
            clock = max(clock, arrivals[i])
            start_next(i)
    for journey, arrival in zip(journeys, arrivals, strict=True):
        clock = max(clock, arrival) + journey.after
    return clock


def _travel(called: float, free: float, transfer: Transfer) -> float:
    return max(called + transfer.delay, free) + transfer.busy
