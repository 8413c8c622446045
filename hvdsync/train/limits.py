"""When a run is to end early: a time limit in, whether it is reached out."""

from __future__ import annotations

import time

import psutil

# What is left of the limit for the last step, the save and the launcher's own end.
_RESERVED_SHARE = 0.1
_RESERVED_SECONDS = 120.0


class TimeLimit:
    """``minutes`` since the process began, less a tenth of it or two minutes; None: no limit."""

    def __init__(self, minutes: float | None) -> None:
        self._end = float("inf")
        if minutes is not None:
            seconds = 60 * minutes
            reserved = min(_RESERVED_SHARE * seconds, _RESERVED_SECONDS)
            # What the imports took counts too.
            age = max(0.0, time.time() - psutil.Process().create_time())
            self._end = time.monotonic() - age + seconds - reserved

    def reached(self) -> bool:
        """Whether it is time to save and end."""
        return time.monotonic() >= self._end
