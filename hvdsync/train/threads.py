"""How many threads this rank may use: affinity and launch in, environment variables out.

Read before any framework is imported, since thread pools are made at import.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)


def share_of_cores(own: int, node: int, local_size: int) -> int:
    """Threads for one of ``local_size`` ranks of a node, which together use its cores once.

    ``own`` is how many cores this process may run on, ``node`` how many the job has on the node:
    the launcher may have bound each rank to some of them.
    """
    return min(own, max(1, node // local_size))


def available_cores() -> tuple[int, int]:
    """Cores that this process may run on, and those that its launcher may."""
    if not hasattr(os, "sched_getaffinity"):  # macOS binds nothing
        count = os.cpu_count() or 1
        return count, count
    own = os.sched_getaffinity(0)
    try:
        # mpirun and srun bind each rank; the process that started it still has them all.
        launcher = os.sched_getaffinity(os.getppid())
    except OSError:
        launcher = own
    return len(own), len(own | launcher)


def cap(environ: MutableMapping[str, str], count: int) -> None:
    """Ask every thread pool for ``count`` threads, except where the user has asked already."""
    for variable in VARIABLES:
        environ.setdefault(variable, str(count))
