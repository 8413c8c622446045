"""A launch that a benchmark starts: a command in, nothing out but what its ranks write."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from hvdsync.errors import HvdsyncError

_LAST_LINES = 20


def finish(
    command: Sequence[str],
    what: str,
    timeout_seconds: float,
    env: Mapping[str, str] | None = None,
) -> None:
    """Wait for ``command``; raises :class:`HvdsyncError` with its last lines when it fails.

    ``what`` it was begins the message; ``env`` is its whole environment. Raises
    ``subprocess.TimeoutExpired`` when it takes too long.
    """
    done = subprocess.run(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_seconds,
        check=False,
        env=env,
    )
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
        raise HvdsyncError(f"{what} failed:\n{last}")
