"""Lead a build: decide which extensions are wanted, build what is missing, install, prove.

In: the wishes of the command line. Out: Horovod installed with the extensions that fit.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from hvdsync.errors import BuildError
from hvdsync.tools.horovod_build import toolchain, wheels
from hvdsync.tools.horovod_build.compiling import compile_wheel
from hvdsync.tools.horovod_build.installed import Installed, find_installed
from hvdsync.tools.horovod_build.proof import prove
from hvdsync.tools.horovod_build.source import HOROVOD_VERSION, cache_folder, fetch_sdist
from hvdsync.tools.horovod_build.toolchain import FRAMEWORKS, TITLES, Target

Compile = Callable[[Target, Path, Path, Path, Console], Path]


@dataclass(frozen=True)
class Outcome:
    """What a build did: framework to key, those compiled now, and whether pip installed."""

    keys: dict[str, str]
    compiled: list[str] = field(default_factory=list)
    installed: bool = False


def choose(wishes: dict[str, bool | None], present: list[str]) -> list[str]:
    """Frameworks to build for; a wish is True, False, or None when nothing was said.

    With no True among the wishes, every framework present is wanted that was not refused.
    """
    named = [name for name in FRAMEWORKS if wishes.get(name)]
    missing = [name for name in named if name not in present]
    if missing:
        title, extra = TITLES[missing[0]], missing[0]
        raise BuildError(
            f"Horovod cannot be built for {title}, which is not installed in {sys.prefix}. "
            f'Install it first: pip install "hvdsync[{extra}]".'
        )
    if named:
        return named
    return [name for name in FRAMEWORKS if name in present and wishes.get(name) is not False]


def build_horovod(
    *,
    torch: bool | None = None,
    tensorflow: bool | None = None,
    gpu: str = "auto",
    force: bool = False,
    console: Console | None = None,
) -> Outcome:
    """Have Horovod installed with an extension for each wanted framework.

    None means: for the frameworks that are installed, unless another was named. An extension that
    is installed and fits is kept. ``force`` compiles again even what the cache holds.
    Raises :class:`~hvdsync.errors.BuildError` with the reason and a cure.
    """
    console = console or Console()
    wishes = {"torch": torch, "tensorflow": tensorflow}
    found = {name: toolchain.find_framework(name) for name in FRAMEWORKS}
    present = [name for name, framework in found.items() if framework]
    wanted = choose(wishes, present)
    mpi = toolchain.find_mpi()
    targets = {}
    for name, framework in found.items():
        if framework and (name in wanted or wishes[name] is None):
            # Nobody asked for NCCL for a framework that is only kept.
            kind = gpu if name in wanted else "auto"
            targets[name] = Target(framework, mpi, toolchain.decide_nccl(framework, kind))
    if not wanted:
        raise BuildError(
            f"Neither PyTorch nor TensorFlow is wanted and installed in {sys.prefix}. "
            f'Install one first: pip install "hvdsync[torch]".'
        )
    installed = find_installed()
    kept = [
        name for name in targets if name not in wanted and fits(installed, name, targets[name].key)
    ]
    keys = {name: targets[name].key for name in FRAMEWORKS if name in wanted or name in kept}
    if not force and installed and _exactly(installed, keys):
        console.print(f"Horovod {HOROVOD_VERSION} is installed and fits: {_describe(keys)}.")
        return Outcome(keys)
    if mpi is None:
        console.print(_without_mpi())
    cache = cache_folder()
    compiled = []
    ready = {}
    for name in keys:
        ready[name], is_new = cached_wheel(
            targets[name], cache, force=force and name in wanted, console=console
        )
        compiled += [name] if is_new else []
    install(ready, cache)
    for name in keys:
        if name in compiled or not fits(installed, name, keys[name]):
            prove(name)
            console.print(f"Two ranks agree on an all-reduce with {TITLES[name]}.")
    console.print(f"Horovod {HOROVOD_VERSION} is installed: {_describe(keys)}.")
    return Outcome(keys, compiled, installed=True)


def _without_mpi() -> str:
    choice = toolchain.mpi_choice()
    if choice == "none":
        return f"{toolchain.MPI_VARIABLE}=none: Horovod is built with Gloo only."
    if choice == "system":
        # The cure below would change nothing.
        return (
            f"{toolchain.MPI_VARIABLE}=system, but no mpicxx is on PATH: "
            "Horovod is built with Gloo only."
        )
    return (
        "No MPI is found: Horovod is built with Gloo only. "
        'For MPI too: pip install "hvdsync[mpi]", then build again.'
    )


def fits(installed: Installed | None, framework: str, key: str) -> bool:
    """Whether the installed extension for this framework is the one that ``key`` names."""
    return installed is not None and installed.key(framework) == key


def _exactly(installed: Installed, keys: dict[str, str]) -> bool:
    return {name: installed.key(name) for name in installed.built_for} == keys


def _describe(keys: dict[str, str]) -> str:
    return ", ".join(f"{TITLES[name]} ({key.split('-', 2)[2]})" for name, key in keys.items())


def cached_wheel(
    target: Target,
    cache: Path,
    *,
    force: bool,
    console: Console,
    compiler: Compile = compile_wheel,
) -> tuple[Path, bool]:
    """The wheel of one extension, from the cache or compiled now, and whether it was compiled.

    Builds of one key wait for each other; a wheel appears in the cache whole or not at all.
    """
    folder = cache / "wheels" / target.key
    locks = cache / "locks"
    locks.mkdir(parents=True, exist_ok=True)
    with _lock(locks / f"{target.key}.lock", console, f"another build of {target.key}"):
        present = sorted(folder.glob("horovod-*.whl"))
        if present and not force:
            return present[0], False
        start = time.monotonic()
        (cache / "wheels").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="hvdsync-build-") as private:
            log = cache / "logs" / f"{target.key}.log"
            archive = fetch_sdist(cache)
            raw = compiler(target, archive, Path(private), log, console)
            wheel = _recorded(target, raw, Path(private))
            _publish(wheel, folder)
        seconds = time.monotonic() - start
        console.print(f"Compiled for {TITLES[target.framework.name]} in {seconds:.0f} s.")
        return folder / wheel.name, True


def _recorded(target: Target, wheel: Path, private: Path) -> Path:
    """The same wheel with what it was built for, and its answers, in ``metadata.json``."""
    name = target.framework.name
    tree = wheels.unpack_wheel(wheel, private / "recorded")
    folders = [target.mpi.library_folder] if target.mpi else []
    folders += [target.nccl.nccl_library_folder] if target.nccl else []
    entry: dict[str, Any] = {
        "key": target.key,
        "version": target.framework.version,
        "mpi": target.mpi.label if target.mpi else None,
        "gpu": target.nccl.label if target.nccl else None,
        "answers": wheels.ask_extension(tree, name, folders),
    }
    wheels.record(tree, name, entry)
    return wheels.pack_wheel(tree, private / "packed")


def _publish(wheel: Path, folder: Path) -> None:
    """Move the wheel into the cache in one step, beside whatever is there."""
    folder.mkdir(parents=True, exist_ok=True)
    # The temporary folder may be on another disk, where a rename is a copy: copy first.
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".part", delete=False) as part:
        partial = Path(part.name)
    try:
        shutil.copy(wheel, partial)
        os.replace(partial, folder / wheel.name)
    finally:
        partial.unlink(missing_ok=True)


def install(ready: dict[str, Path], cache: Path) -> None:
    """Install the union of the given wheels into this environment, in place of any Horovod.

    Raises :class:`BuildError` with what pip said when it fails.
    """
    (cache / "locks").mkdir(parents=True, exist_ok=True)
    prefix = hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]
    with (
        FileLock(cache / "locks" / f"install-{prefix}.lock"),
        tempfile.TemporaryDirectory(prefix="hvdsync-install-") as private,
    ):
        wheel = wheels.merge(ready, Path(private))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        command += ["--force-reinstall", str(wheel)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        tail = "\n".join(result.stderr.strip().splitlines()[-8:])
        raise BuildError(f"pip could not install the wheel of Horovod:\n{tail}")


@contextmanager
def _lock(path: Path, console: Console, what: str) -> Iterator[None]:
    """Hold the lock; says so when it has to wait."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        console.print(f"Waiting for {what} to finish ...")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
