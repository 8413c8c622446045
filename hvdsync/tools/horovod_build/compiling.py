"""Compile one extension: patched source in, a wheel and a log file out.

In: a :class:`Target` and a private folder. Out: the wheel pip made, with progress shown meanwhile.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from hvdsync.errors import BuildError
from hvdsync.tools.horovod_build.capabilities import cuda_list
from hvdsync.tools.horovod_build.replacement import apply
from hvdsync.tools.horovod_build.source import unpack
from hvdsync.tools.horovod_build.toolchain import (
    CUDA_LIST_VARIABLE,
    TITLES,
    Target,
    find_cmake,
    find_compiler,
    run_paths,
)

_PERCENT = re.compile(r"^\s*\[\s*(\d+)%\]")
_TAIL_LINES = 15
#: What one compiler process needs at its largest, so that the machine does not start to swap.
_BYTES_PER_JOB = 2 * 2**30
_SECONDS_BETWEEN_LINES = 20.0
#: CMake's name for the extension's own target.
_CMAKE_TARGETS = {"torch": "pytorch", "tensorflow": "tensorflow"}


def check_toolchain() -> None:
    """Raise :class:`BuildError` with a cure when a compiler, make or CMake is missing."""
    if find_compiler() is None:
        raise BuildError(
            "No C++ compiler is found, and Horovod is C++ that must be compiled here. Install one "
            "(Debian: apt install g++; Fedora: dnf install gcc-c++), or set CXX to it."
        )
    if find_cmake() is None:
        raise BuildError('No cmake is found. Install it with: pip install "hvdsync[build]".')


def compile_wheel(target: Target, archive: Path, folder: Path, log: Path, console: Console) -> Path:
    """Build the wheel of one extension inside ``folder`` and return its path.

    Raises :class:`BuildError` with the log's last lines and its path when the build fails.
    """
    check_toolchain()
    framework = target.framework
    tree = unpack(archive, folder / "source")
    apply(tree, target.replacements)
    wheels = folder / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(wheels), str(tree)]
    title = f"Compiling Horovod for {TITLES[framework.name]} {framework.version}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as writer, _progress(console, title) as progress:
        process = subprocess.Popen(
            command,
            env=build_environment(target, folder, dict(os.environ)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        try:
            for line in process.stdout or ():
                writer.write(line)
                match = _PERCENT.match(line)
                if match:
                    progress.update(int(match.group(1)))
            code = process.wait()
        finally:
            if process.poll() is None:
                _end(process)
    made = sorted(wheels.glob("horovod-*.whl"))
    if code or len(made) != 1:
        raise BuildError(_failure(title, code, log))
    return made[0]


def build_environment(target: Target, folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """The variables that Horovod's ``setup.py`` and CMake read, added to ``environment``."""
    # What a make around us has set would be read by the make inside.
    for name in ("MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "HOROVOD_GPU_OPERATIONS"):
        environment.pop(name, None)
    bins = [str(Path(sys.prefix) / "bin")]
    if target.mpi:
        bins.append(str(target.mpi.wrapper.parent))
    environment["PATH"] = os.pathsep.join([*bins, environment.get("PATH", os.defpath)])
    wanted = target.framework.name
    for name, word in (("torch", "PYTORCH"), ("tensorflow", "TENSORFLOW"), ("mxnet", "MXNET")):
        environment[f"HOROVOD_WITH{'' if name == wanted else 'OUT'}_{word}"] = "1"
        environment.pop(f"HOROVOD_WITH{'OUT' if name == wanted else ''}_{word}", None)
    environment["HOROVOD_WITH_GLOO"] = "1"
    environment["HOROVOD_WITH_MPI" if target.mpi else "HOROVOD_WITHOUT_MPI"] = "1"
    environment["MAKEFLAGS"] = f"-j{jobs()}"
    # Read by CMake 4 only, which otherwise refuses the minimum that Gloo's build files ask for.
    environment["CMAKE_POLICY_VERSION_MINIMUM"] = "3.5"
    options = [
        "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
        f"-DCMAKE_INSTALL_RPATH={';'.join(run_paths(target))}",
    ]
    if target.nccl:
        environment["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        environment["HOROVOD_CUDA_HOME"] = environment["CUDA_HOME"] = str(target.nccl.cuda_home)
        environment["HOROVOD_NCCL_HOME"] = str(_nccl_folder(target, folder))
        environment["HOROVOD_NCCL_LINK"] = "SHARED"
        if not environment.get(CUDA_LIST_VARIABLE):
            environment.pop(CUDA_LIST_VARIABLE, None)
            listed = cuda_list(target.framework, target.nccl.cuda_home / "bin" / "nvcc")
            environment.update({CUDA_LIST_VARIABLE: listed} if listed else {})
    elif target.framework.cuda is None:
        # An nvcc on PATH must not be taken for a wish, nor its quarrels with the compiler matter.
        options += [
            "-DCMAKE_CUDA_COMPILER=NOTFOUND",
            "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON",
        ]
    environment["HVDSYNC_CMAKE_ARGS"] = "\n".join(options)
    environment["HVDSYNC_CMAKE_BUILD_ARGS"] = f"--target\n{_CMAKE_TARGETS[wanted]}"
    return environment


def jobs() -> int:
    """Compiler processes at a time: the cores this process may use, or fewer for want of memory."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(cores, psutil.virtual_memory().available // _BYTES_PER_JOB))


def _nccl_folder(target: Target, folder: Path) -> Path:
    """A folder as CMake expects it; the wheel's has no ``libnccl.so`` without a version."""
    assert target.nccl is not None
    home = folder / "nccl"
    (home / "lib").mkdir(parents=True, exist_ok=True)
    if not (home / "include").exists():
        (home / "include").symlink_to(target.nccl.nccl_home / "include")
        library = sorted(target.nccl.nccl_library_folder.glob("libnccl.so*"))[0]
        (home / "lib" / "libnccl.so").symlink_to(library)
    return home


def _end(process: subprocess.Popen[str]) -> None:
    """End a build that was interrupted, with the compilers it started."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    process.terminate()
    for child in children:
        try:
            child.terminate()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def _failure(title: str, code: int, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if re.search(r"\berror:|CMake Error|\bfatal\b", line)][:3]
    tail = "\n".join(dict.fromkeys([*errors, *lines[-_TAIL_LINES:]]))
    return (
        f"{title} failed (exit code {code}). The whole log is {log}; its last lines:\n{tail}\n"
        f"`python -m hvdsync doctor` says what the build needs and what is there."
    )


class _Reporter(Protocol):
    def update(self, percent: int) -> None: ...


class _Bar:
    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=100)

    def update(self, percent: int) -> None:
        self._progress.update(self._task, completed=percent)


class _Lines:
    def __init__(self, console: Console, title: str) -> None:
        self._console, self._title = console, title
        self._start = self._said = time.monotonic()
        self._percent = 0

    def update(self, percent: int) -> None:
        now = time.monotonic()
        if percent > self._percent and now - self._said >= _SECONDS_BETWEEN_LINES:
            self._console.print(f"{self._title}: {percent} % after {now - self._start:.0f} s")
            self._said = now
        self._percent = percent


@contextmanager
def _progress(console: Console, title: str) -> Iterator[_Reporter]:
    """A bar on a terminal, a line now and then elsewhere."""
    if not console.is_terminal:
        console.print(f"{title} ...")
        yield _Lines(console, title)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        yield _Bar(progress, title)
