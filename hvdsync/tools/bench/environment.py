"""Where a measurement was made: versions, cores, ranks per core, threads and how ranks talk.

Without this a number cannot be compared with another one.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata

from hvdsync.comm import launch

_PACKAGES = ("hvdsync", "horovod", "torch", "tensorflow-cpu", "tensorflow", "keras", "mpi4py")


def cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not everywhere
        return os.cpu_count() or 1


def describe(**more: object) -> dict[str, object]:
    """Facts of this process and its launch, and ``more`` of the measurement's own."""
    started = launch.detect()
    ranks = 1 if started is None else started.size
    local = 1 if started is None else started.local_size
    return {
        "Python": platform.python_version(),
        **{name: version for name in _PACKAGES if (version := _version(name))},
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": cores(),
        "ranks": ranks,
        "ranks per core": round(local / cores(), 2),
        "threads per rank": os.environ.get("OMP_NUM_THREADS", "chosen by the framework"),
        "launch": "alone" if started is None else started.launcher,
        **more,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
