"""How long a collective may wait for a rank that does not come, in seconds."""

from __future__ import annotations

import os

DEFAULT_SECONDS = 600.0
VARIABLE = "HVDSYNC_WAIT_LIMIT"


def resolve(wait_limit: float | None) -> float:
    """The argument, else the variable ``HVDSYNC_WAIT_LIMIT``, else 600; 0 is no limit.

    Raises ``ValueError`` for what is no number from 0 up, naming where it came from.
    """
    source, value = "init(wait_limit=...)", wait_limit
    if value is None:
        source, value = VARIABLE, os.environ.get(VARIABLE) or DEFAULT_SECONDS  # type: ignore[assignment]
    try:
        seconds = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"{source} is {value!r}, expected seconds from 0 (no limit) up")
    return seconds
