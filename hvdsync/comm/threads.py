"""How many threads this rank may use: affinity and launch in, a framework's thread pools capped.

By environment variables before the framework is imported, or by its own functions after.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

import psutil

logger = logging.getLogger(__name__)

VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)
# By which a user chooses for one framework.
_SPOKEN = {
    "torch": ("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
    "tensorflow": ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"),
}


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


def cap_pools(framework: Any, name: str, local_size: int) -> None:
    """Leave this rank its share of the cores, where the user has chosen no number of threads.

    ``framework`` is the imported ``torch`` or ``tensorflow``, which ``name`` says. A framework
    takes all cores in each process, and ranks of one node then wait for one another's threads.
    Does nothing to TensorFlow once it has run an operation.
    """
    own, node = available_cores()
    count = share_of_cores(own, node, local_size)
    if count >= own or any(variable in os.environ for variable in _SPOKEN[name]):
        return
    if name == "torch":
        # Any other number is one that the user has set.
        if framework.get_num_threads() in (own, psutil.cpu_count(logical=False)):
            framework.set_num_threads(count)
        return
    pools = framework.config.threading
    try:
        if pools.get_intra_op_parallelism_threads() == 0:
            pools.set_intra_op_parallelism_threads(count)
        if pools.get_inter_op_parallelism_threads() == 0:
            pools.set_inter_op_parallelism_threads(count)
    except RuntimeError:
        logger.debug("TensorFlow has made its threads already, for all cores of the node")
