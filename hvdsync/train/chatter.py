"""Keeps TensorFlow's greetings off standard error: what is written there in, the rest of it out.

TensorFlow logs them before it reads how much it is to log, so that no variable turns them off.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_GREETINGS = (
    b"WARNING: All log messages before absl::InitializeLog()",
    b"I0000 ",
    b"To enable the following instructions:",
)


@contextmanager
def without_greetings() -> Iterator[None]:
    """Context in which lines that only greet do not reach standard error; all others do."""
    sys.stderr.flush()
    original = os.dup(2)
    source, sink = os.pipe()
    os.dup2(sink, 2)
    os.close(sink)
    filtering = threading.Thread(target=_filter, args=(source, original), daemon=True)
    filtering.start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, 2)
        # Ends with the pipe, unless a process that was started meanwhile still holds it.
        filtering.join(timeout=1.0)


def _filter(source: int, target: int) -> None:
    with os.fdopen(source, "rb") as lines, os.fdopen(target, "wb", buffering=0) as out:
        for line in lines:
            if not line.startswith(_GREETINGS):
                out.write(line)
