"""Which launcher started this process, read from the environment that it left behind.

Environment variables go in, a ``LaunchInfo`` (or None: started by hand) comes out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchInfo:
    """What a launcher says about this process.

    ``elastic`` is true when rank and size may change while the job runs, so that the numbers
    here are those of the start only.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    elastic: bool = False


class Launcher:
    """A way to start ranks, known by the variables that it sets for each process.

    ``rank`` and ``size`` must both be present for a match; a launcher that does not tell the
    position on the host (``local_rank``, ``local_size``) is read as one host.
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str

    def detect(self, environ: Mapping[str, str]) -> LaunchInfo | None:
        """The launch that ``environ`` describes, or None when another launcher wrote it."""
        if self.rank not in environ or self.size not in environ:
            return None
        rank, size = int(environ[self.rank]), int(environ[self.size])
        return LaunchInfo(
            launcher=self.name,
            rank=rank,
            size=size,
            local_rank=int(environ.get(self.local_rank, rank)),
            local_size=int(environ.get(self.local_size, size)),
            elastic=self.is_elastic(environ),
        )

    def is_elastic(self, environ: Mapping[str, str]) -> bool:
        """Whether the launcher may change the number of ranks while the job runs."""
        return False


class HorovodRun(Launcher):
    """``horovodrun`` over Gloo; over MPI it starts ``mpirun``, and :class:`OpenMpi` sees that."""

    name = "horovodrun"
    rank, size = "HOROVOD_RANK", "HOROVOD_SIZE"
    local_rank, local_size = "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"

    def is_elastic(self, environ: Mapping[str, str]) -> bool:
        return environ.get("HOROVOD_ELASTIC") == "1"


class OpenMpi(Launcher):
    """Open MPI's ``mpirun``."""

    name = "mpirun"
    rank, size = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"
    local_rank, local_size = "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"


class Hydra(Launcher):
    """``mpiexec`` of MPICH and Intel MPI."""

    name = "mpiexec"
    rank, size = "PMI_RANK", "PMI_SIZE"
    local_rank, local_size = "MPI_LOCALRANKID", "MPI_LOCALNRANKS"


class TorchRun(Launcher):
    """``torchrun``; its plain names count only beside the variable that is its alone."""

    name = "torchrun"
    rank, size = "RANK", "WORLD_SIZE"
    local_rank, local_size = "LOCAL_RANK", "LOCAL_WORLD_SIZE"

    def detect(self, environ: Mapping[str, str]) -> LaunchInfo | None:
        return super().detect(environ) if "TORCHELASTIC_RUN_ID" in environ else None


class Srun(Launcher):
    """Slurm's ``srun``; the step's size tells its tasks from the batch script around them."""

    name = "srun"
    rank, size = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"
    local_rank, local_size = "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"

    def detect(self, environ: Mapping[str, str]) -> LaunchInfo | None:
        # Slurm writes tasks per node as "2(x3),1"; with unequal nodes the first count stands in.
        per_node = environ.get(self.local_size, "").split(",")[0].split("(")[0]
        return super().detect({**environ, self.local_size: per_node} if per_node else environ)


_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

LAUNCHERS: tuple[Launcher, ...] = (HorovodRun(), OpenMpi(), Hydra(), TorchRun(), Srun())


def detect(environ: Mapping[str, str] | None = None) -> LaunchInfo | None:
    """The launcher that started this process, or None when it was started by hand.

    ``environ`` defaults to the process's own. More specific launchers come first: ``srun`` may
    have started ``mpirun``, and the innermost one decides the rank.
    """
    variables = os.environ if environ is None else environ
    found = (launcher.detect(variables) for launcher in LAUNCHERS)
    return next((launch for launch in found if launch is not None), None)


def claimed(environ: Mapping[str, str] | None = None) -> LaunchInfo | None:
    """The launch that PyTorch's four variables tell of where there is no launcher known here.

    RANK and WORLD_SIZE alone may be anybody's; beside MASTER_ADDR and MASTER_PORT they are those of
    a job of several processes.
    """
    variables = os.environ if environ is None else environ
    if not all(variables.get(name) for name in _ENVIRONMENT):
        return None
    rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    return LaunchInfo(f"who set {', '.join(_ENVIRONMENT)}", rank, size, rank, size)


def is_elastic() -> bool:
    """Whether ranks may come and go while this job runs."""
    launch = detect()
    return launch is not None and launch.elastic
