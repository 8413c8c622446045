"""Look at this machine: programs, packages, Horovod, GPUs, data.

In: the environment of this process. Out: :class:`Findings`, plain values and no opinion.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

from hvdsync.comm.launch import LaunchInfo, detect
from hvdsync.data import mnist
from hvdsync.tools.horovod_build import toolchain
from hvdsync.tools.horovod_build.installed import Installed, find_installed
from hvdsync.tools.horovod_build.source import cache_folder

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
_TRY_SECONDS = 120

_TRY = {
    "torch": """
import torch, horovod.torch as hvd
hvd.init()
assert hvd.allreduce(torch.ones(2), name="doctor").tolist() == [1.0, 1.0]
""",
    "tensorflow": """
import tensorflow as tf, horovod.tensorflow as hvd
hvd.init()
assert hvd.allreduce(tf.ones(2), name="doctor").numpy().tolist() == [1.0, 1.0]
""",
}


@dataclass(frozen=True)
class Findings:
    """What was found; None or empty where nothing was."""

    python: tuple[int, int, int]
    prefix: Path
    in_virtual_environment: bool
    compiler: str | None
    make: Path | None
    cmake: str | None
    mpi: toolchain.Mpi | None
    mpirun: Path | None
    mpi4py: str | None
    frameworks: dict[str, toolchain.Framework]
    keras: str | None
    horovod: Installed | None
    #: framework -> cache key of the extension that would be built now
    fitting_keys: dict[str, str]
    #: framework -> None when an all-reduce with it worked, else the end of what it said
    tried: dict[str, str | None]
    gpus: list[str]
    nvcc: Path | None
    nccl: Path | None
    ssh: Path | None
    cores: int
    memory_bytes: int
    threads: dict[str, str]
    mnist_folder: Path
    mnist_missing: list[str]
    cache: Path
    cached_wheels: int
    cache_bytes: int
    launch: LaunchInfo | None
    launch_error: str | None = None
    #: HVDSYNC_MPI as it is set for this process
    mpi_choice: str | None = None
    machine: str = field(default_factory=platform.platform)


def gather(try_horovod: bool = True) -> Findings:
    """Look at everything; ``try_horovod`` runs one all-reduce per framework, some seconds."""
    frameworks = {}
    for name in toolchain.FRAMEWORKS:
        framework = toolchain.find_framework(name)
        if framework:
            frameworks[name] = framework
    mpi = toolchain.find_mpi()
    installed = find_installed()
    keys = {
        name: toolchain.Target(framework, mpi, toolchain.decide_nccl(framework, "auto")).key
        for name, framework in frameworks.items()
    }
    tried = {}
    if try_horovod and installed:
        names = [name for name in frameworks if name in installed.built_for]
        with ThreadPoolExecutor() as pool:
            tried = dict(zip(names, pool.map(_try, names), strict=True))
    compiler, cmake, nccl = toolchain.find_compiler(), toolchain.find_cmake(), toolchain.find_nccl()
    launch, launch_error = _launch()
    cache = cache_folder()
    files = [path for path in cache.rglob("*") if path.is_file()] if cache.is_dir() else []
    return Findings(
        python=sys.version_info[:3],
        prefix=Path(sys.prefix),
        in_virtual_environment=sys.prefix != sys.base_prefix,
        compiler=_first_line([str(compiler), "--version"]) if compiler else None,
        make=_which("make"),
        cmake=_first_line([str(cmake), "--version"]) if cmake else None,
        mpi=mpi,
        mpirun=_which("mpirun"),
        mpi4py=_version("mpi4py"),
        frameworks=frameworks,
        keras=_version("keras"),
        horovod=installed,
        fitting_keys=keys,
        tried=tried,
        gpus=_gpus(),
        nvcc=toolchain.find_nvcc(),
        nccl=nccl[0] if nccl else None,
        ssh=_which("ssh"),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=psutil.virtual_memory().total,
        threads={name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        mnist_folder=mnist.default_directory(),
        mnist_missing=sorted(mnist.missing()),
        cache=cache,
        cached_wheels=sum(path.suffix == ".whl" for path in files),
        cache_bytes=sum(path.stat().st_size for path in files),
        launch=launch,
        launch_error=launch_error,
        mpi_choice=toolchain.mpi_choice(),
    )


def _which(name: str) -> Path | None:
    beside_python = Path(sys.prefix) / "bin" / name
    found = str(beside_python) if beside_python.exists() else shutil.which(name)
    return Path(found) if found else None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} ({error})"
    return next(iter(result.stdout.splitlines()), command[0])


def _gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return result.stdout.split("\n")[:-1] if result.returncode == 0 else []


def _launch() -> tuple[LaunchInfo | None, str | None]:
    try:
        return detect(), None
    except (ValueError, KeyError) as error:
        return None, f"{type(error).__name__}: {error}"


def _try(framework: str) -> str | None:
    """One process, no launcher: None when an all-reduce works, else the last line it said."""
    environment = {
        name: value
        for name, value in os.environ.items()
        # Under a launcher the child must not take itself for one of its ranks.
        if not name.startswith(("HOROVOD_", "OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_"))
    }
    environment.update(
        HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo", TF_CPP_MIN_LOG_LEVEL="3"
    )
    try:
        result = subprocess.run(
            [sys.executable, "-c", _TRY[framework]],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=_TRY_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_TRY_SECONDS} s"
    if result.returncode == 0:
        return None
    lines = result.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {result.returncode}"
