"""Tiny made-up wheels and findings for the tests of the tools."""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdsync.tools.diagnosis.findings import Findings
from hvdsync.tools.horovod_build.installed import Installed
from hvdsync.tools.horovod_build.toolchain import Framework, Mpi

EXTENSION = {"torch": "mpi_lib_v2.so", "tensorflow": "mpi_lib.so"}
METADATA_NAME = {"torch": "pytorch", "tensorflow": "tensorflow"}
WHEEL_NAME = "horovod-0.28.1-py3-none-any.whl"


@pytest.fixture
def make_wheel() -> Callable[[Path, str, str], Path]:
    """``make_wheel(folder, framework, version)``: a valid wheel of horovod with one extension."""

    def make(folder: Path, framework: str, version: str) -> Path:
        info = "horovod-0.28.1.dist-info"
        record: dict[str, Any] = {"key": f"key-{framework}", "version": version}
        content = {
            METADATA_NAME[framework]: version,
            "dummy": "none",
            "hvdsync": {"extensions": {framework: record}},
        }
        files = {
            "horovod/__init__.py": b"",
            "horovod/torch/__init__.py": b"",
            "horovod/tensorflow/__init__.py": b"",
            "horovod/metadata.json": json.dumps(content).encode(),
            f"horovod/{framework}/{EXTENSION[framework]}": f"built for {framework}".encode(),
            f"{info}/METADATA": b"Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n",
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
            b"Tag: py3-none-any\n",
        }
        lines = []
        for name, data in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}\n")
        files[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"]).encode()
        folder.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(folder / WHEEL_NAME, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        return folder / WHEEL_NAME

    return make


def healthy_findings() -> Findings:
    """A machine on which everything is there and fits."""
    records = {
        name: {"key": f"key-{name}", "mpi": "openmpi5.0.11", "gpu": None, "answers": {}}
        for name in ("torch", "tensorflow")
    }
    return Findings(
        python=(3, 11, 7),
        prefix=Path("/venv"),
        in_virtual_environment=True,
        compiler="g++ 12.2.0",
        make=Path("/usr/bin/make"),
        cmake="cmake version 3.31.10",
        mpi=Mpi("openmpi5.0.11", Path("/venv/bin/mpicxx"), Path("/venv/lib"), True),
        mpirun=Path("/venv/bin/mpirun"),
        mpi4py="4.1.2",
        frameworks={
            "torch": Framework("torch", "2.13.0+cpu"),
            "tensorflow": Framework("tensorflow", "2.21.0"),
        },
        keras="3.15.1",
        horovod=Installed(
            "0.28.1",
            Path("/venv/lib"),
            {"torch": "2.13.0+cpu", "tensorflow": "2.21.0"},
            records,
        ),
        fitting_keys={"torch": "key-torch", "tensorflow": "key-tensorflow"},
        tried={"torch": None, "tensorflow": None},
        gpus=[],
        nvcc=None,
        nccl=None,
        ssh=Path("/usr/bin/ssh"),
        cores=2,
        memory_bytes=8 * 2**30,
        threads={},
        mnist_folder=Path("/cache/mnist"),
        mnist_missing=[],
        cache=Path("/cache"),
        cached_wheels=2,
        cache_bytes=2**20,
        launch=None,
        machine="test",
    )


@pytest.fixture
def findings() -> Callable[..., Findings]:
    """``findings(compiler=None)``: the healthy machine with some findings changed."""
    return lambda **changes: replace(healthy_findings(), **changes)
