"""Judge what was found: each line says what it is, how it stands, and what to do about it.

In: :class:`~hvdsync.tools.diagnosis.findings.Findings`. Out: a list of :class:`Verdict`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from hvdsync.tools.diagnosis.findings import Findings
from hvdsync.tools.horovod_build.source import HOROVOD_VERSION
from hvdsync.tools.horovod_build.toolchain import TITLES

_BUILD = "python -m hvdsync build-horovod"
_INSTALL_COMPILER = "Debian: apt install g++; Fedora: dnf install gcc-c++"


class Status(StrEnum):
    """How a thing stands. Only BROKEN makes doctor fail."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True)
class Verdict:
    """One line of the report; ``cure`` is empty when there is nothing to do."""

    topic: str
    status: Status
    text: str
    cure: str = ""


def judge(found: Findings) -> list[Verdict]:
    """All verdicts, in the order of the report."""
    return [
        *_python(found),
        *_frameworks(found),
        *_horovod(found),
        *_build_tools(found),
        *_mpi(found),
        *_gpu(found),
        *_machine(found),
        *_data(found),
    ]


def is_broken(verdicts: list[Verdict]) -> bool:
    """Whether something that is needed does not work."""
    return any(verdict.status is Status.BROKEN for verdict in verdicts)


def _python(found: Findings) -> Iterator[Verdict]:
    version = ".".join(map(str, found.python))
    text = f"{version} in {found.prefix}"
    if found.python < (3, 11):
        yield Verdict("Python", Status.BROKEN, f"{text} is too old", "Install Python 3.11 or newer")
    else:
        yield Verdict("Python", Status.OK, text)


def _frameworks(found: Findings) -> Iterator[Verdict]:
    if not found.frameworks:
        yield Verdict(
            "frameworks",
            Status.BROKEN,
            "neither PyTorch nor TensorFlow is installed",
            'pip install "hvdsync[torch]" or "hvdsync[tensorflow]"',
        )
        return
    for name, title in TITLES.items():
        framework = found.frameworks.get(name)
        if framework is None:
            yield Verdict(title, Status.NOTE, "not installed")
            continue
        kind = f"CUDA {framework.cuda}" if framework.cuda else "CPU"
        yield Verdict(title, Status.OK, f"{framework.version} ({kind} build)")
    if found.keras is None:
        yield Verdict("Keras", Status.NOTE, "not installed")
    elif int(found.keras.split(".")[0]) < 3:
        yield Verdict(
            "Keras",
            Status.WARNING,
            f"{found.keras}: hvdsync.keras needs Keras 3",
            'pip install "hvdsync[keras]"',
        )
    else:
        yield Verdict("Keras", Status.OK, found.keras)


def _horovod(found: Findings) -> Iterator[Verdict]:
    horovod = found.horovod
    if horovod is None:
        yield Verdict("Horovod", Status.BROKEN, "Horovod is not installed", _BUILD)
        return
    if horovod.version.split("+")[0] != HOROVOD_VERSION:
        yield Verdict(
            "Horovod",
            Status.WARNING,
            f"{horovod.version} is installed, hvdsync is tested with {HOROVOD_VERSION}",
            _BUILD,
        )
    missing = [name for name in found.frameworks if name not in horovod.built_for]
    for name in missing:
        only = len(missing) == len(found.frameworks)
        yield Verdict(
            f"Horovod for {TITLES[name]}",
            Status.BROKEN if only else Status.WARNING,
            f"Horovod is installed, but was not built for {TITLES[name]}",
            f"{_BUILD} --{name}",
        )
    for name, version in horovod.built_for.items():
        yield _extension(found, name, version)


def _extension(found: Findings, name: str, built_for: str) -> Verdict:
    """The one verdict about an extension: the first that applies, worst first."""
    assert found.horovod is not None
    title, topic = TITLES[name], f"Horovod for {TITLES[name]}"
    cure = f"{_BUILD} --{name}"
    framework = found.frameworks.get(name)
    entry = found.horovod.records.get(name, {})
    if framework is None:
        return Verdict(topic, Status.NOTE, f"built for {title} {built_for}, which is not installed")
    if built_for not in (framework.version, "unknown"):
        return Verdict(
            topic,
            Status.BROKEN,
            f"{title} was changed after Horovod was built: built for {built_for}, "
            f"found {framework.version}",
            cure,
        )
    mpi = entry.get("mpi")
    if mpi and found.mpi is None and found.mpi_choice != "none":
        return Verdict(
            topic,
            Status.BROKEN,
            f"Horovod was built with {mpi}, which is gone",
            f'pip install "hvdsync[mpi]", or build without it: {cure}',
        )
    trouble = found.tried.get(name)
    if trouble:
        return Verdict(
            topic,
            Status.BROKEN,
            f"an all-reduce in one process failed: {trouble}",
            f"{cure} --force",
        )
    if not entry:
        return Verdict(
            topic,
            Status.WARNING,
            f"{found.horovod.version} built for {built_for}, not by hvdsync: horovodrun takes "
            "seconds more to start, and its MPI options do not suit Open MPI 5",
            cure,
        )
    if entry.get("key") != found.fitting_keys.get(name):
        return Verdict(
            topic,
            Status.WARNING,
            f"built as {entry.get('key')}; what is here now would give {found.fitting_keys[name]}",
            cure,
        )
    words = ["Gloo"]
    words += [mpi] if mpi else []
    words += [f"NCCL ({entry['gpu']})"] if entry.get("gpu") else []
    works = "; an all-reduce works" if name in found.tried else ""
    text = f"{found.horovod.version} built for {built_for} with {', '.join(words)}{works}"
    return Verdict(topic, Status.OK, text)


def _build_tools(found: Findings) -> Iterator[Verdict]:
    # What is built and fits runs without a compiler; what is not built cannot do without one.
    built = found.horovod is not None and all(
        found.horovod.key(name) == key for name, key in found.fitting_keys.items()
    )
    absent = Status.WARNING if built else Status.BROKEN
    if found.compiler is None:
        text = "no C++ compiler is found; Horovod cannot be built"
        yield Verdict("compiler", absent, text, f"{_INSTALL_COMPILER}; or set CXX")
    else:
        yield Verdict("compiler", Status.OK, found.compiler)
    if found.make is None:
        yield Verdict("make", absent, "make is not found", "Debian: apt install make")
    if found.cmake is None:
        text = "cmake is not found; Horovod cannot be built"
        yield Verdict("cmake", absent, text, 'pip install "hvdsync[build]"')
    else:
        yield Verdict("cmake", Status.OK, found.cmake)


def _mpi(found: Findings) -> Iterator[Verdict]:
    if found.mpi is None and found.mpi_choice == "none":
        text = "left out (HVDSYNC_MPI=none): horovodrun works over Gloo, mpirun does not"
        yield Verdict("MPI", Status.NOTE, text)
        return
    if found.mpi is None:
        yield Verdict(
            "MPI",
            Status.WARNING,
            "no MPI is found: horovodrun works over Gloo, mpirun and horovodrun --mpi do not",
            f'pip install "hvdsync[mpi]", then {_BUILD}',
        )
        return
    parts = [found.mpi.label, f"mpirun {found.mpirun}" if found.mpirun else "no mpirun"]
    parts.append(f"mpi4py {found.mpi4py}" if found.mpi4py else "no mpi4py")
    yield Verdict("MPI", Status.OK if found.mpirun else Status.WARNING, ", ".join(parts))


def _gpu(found: Findings) -> Iterator[Verdict]:
    if not found.gpus:
        extra = f"; nvcc is {found.nvcc}" if found.nvcc else ""
        yield Verdict("GPU", Status.NOTE, f"no NVIDIA GPU is seen{extra}")
        return
    names = ", ".join(sorted(set(found.gpus)))
    yield Verdict("GPU", Status.OK, f"{len(found.gpus)} x {names}")
    for name, framework in found.frameworks.items():
        title = TITLES[name]
        if framework.cuda is None:
            yield Verdict(
                f"GPU with {title}",
                Status.WARNING,
                f"{title} {framework.version} is a CPU build and will not use the GPUs",
                f"install a CUDA build of {title}, then {_BUILD} --{name}",
            )
            continue
        entry = found.horovod.records.get(name, {}) if found.horovod else {}
        answers = entry.get("answers", {})
        if entry and not answers.get("built with NCCL"):
            missing = [
                word
                for word, there in (("the CUDA toolkit (nvcc)", found.nvcc), ("NCCL", found.nccl))
                if there is None
            ]
            first = f"install {' and '.join(missing)}, then " if missing else ""
            yield Verdict(
                f"GPU with {title}",
                Status.WARNING,
                "Horovod was built without NCCL: gradients on GPUs cannot be reduced by NCCL",
                f"{first}{_BUILD} --{name} --gpu nccl",
            )
        else:
            text = f"NCCL in {found.nccl}" if found.nccl else "NCCL is built in"
            yield Verdict(f"GPU with {title}", Status.OK, text)


def _machine(found: Findings) -> Iterator[Verdict]:
    memory = found.memory_bytes / 2**30
    text = f"{found.cores} cores for this process, {memory:.0f} GiB of memory"
    yield Verdict("machine", Status.OK, text)
    if found.threads:
        text = ", ".join(f"{name}={value}" for name, value in found.threads.items())
        yield Verdict("threads", Status.NOTE, f"set by hand: {text}")
    if found.ssh is None:
        text = "ssh is not found; horovodrun needs it for more than one host"
        yield Verdict("ssh", Status.NOTE, text, "Debian: apt install openssh-client")
    else:
        yield Verdict("ssh", Status.OK, str(found.ssh))
    if found.launch_error:
        text = f"the launcher's variables cannot be read: {found.launch_error}"
        yield Verdict("launcher", Status.BROKEN, text, "unset them, or start by that launcher")
    elif found.launch is None:
        yield Verdict("launcher", Status.NOTE, "none: started by hand, one process")
    else:
        at = found.launch
        text = (
            f"{at.launcher}: rank {at.rank} of {at.size}, "
            f"local rank {at.local_rank} of {at.local_size}"
        )
        if at.elastic:
            text += "; elastic, these are the numbers of its start"
        if at.launcher == "torchrun":
            # Horovod has no way to find the others; a process group has.
            text += '; for init(engine="ddp") and python -m hvdsync.train --engine ddp'
        yield Verdict("launcher", Status.OK, text)


def _data(found: Findings) -> Iterator[Verdict]:
    if found.mnist_missing:
        yield Verdict(
            "MNIST",
            Status.NOTE,
            f"not complete in {found.mnist_folder}: {', '.join(found.mnist_missing)}",
            "python -m hvdsync data mnist (training fetches it too)",
        )
    else:
        yield Verdict("MNIST", Status.OK, f"complete in {found.mnist_folder}")
    size = found.cache_bytes / 2**20
    text = f"{found.cache}: {found.cached_wheels} wheels, {size:.0f} MiB"
    yield Verdict("cache", Status.OK, text)
