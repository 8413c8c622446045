"""Things that are timed in turns, round after round, on all ranks: steppers in, seconds out.

What changes on the machine meanwhile changes for all of them, so that ratios within a round stand.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from statistics import median

import numpy as np

from hvdsync.comm import verbs, world

_WARM_UP = 5


def take_turns(
    steps: Mapping[str, Callable[[], object]], *, rounds: int, seconds: float, first: str
) -> dict[str, list[float]]:
    """Seconds of one step of each, by round: those of the slowest rank. Collective.

    In each round every one takes as many steps as ``first`` takes in about ``seconds``; who begins
    changes from round to round.
    """
    for step in steps.values():
        for _ in range(_WARM_UP):
            step()
    count = _steps_within(steps[first], seconds)
    names = list(steps)
    taken = {name: np.zeros(rounds) for name in names}
    for i in range(rounds):
        start = i % len(names)
        for name in names[start:] + names[:start]:
            step = steps[name]
            world.current().barrier()
            started = time.perf_counter()
            for _ in range(count):
                step()
            taken[name][i] = (time.perf_counter() - started) / count
    of_ranks = verbs.allgather_object(taken)
    return {name: np.max([own[name] for own in of_ranks], axis=0).tolist() for name in names}


def _steps_within(step: Callable[[], object], seconds: float) -> int:
    times = []
    for _ in range(_WARM_UP):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return int(max(verbs.allgather_object(math.ceil(seconds / median(times)))))
