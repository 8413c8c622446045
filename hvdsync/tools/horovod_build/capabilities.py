"""Which GPUs a CUDA build is for: the compute capabilities that its kernels are compiled for.

In: an installed framework and nvcc. Out: a list such as ``75,80,90``, the same with or without GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from hvdsync.errors import BuildError
from hvdsync.tools.horovod_build.toolchain import CUDA_LIST_VARIABLE, Framework, package_folder

# torch.cuda.get_arch_list() says nothing where no GPU is; what it is made of does.
_TORCH = "import torch; print(torch._C._cuda_getArchFlags() or '')"
_LIMIT_SECONDS = 120


def cuda_list(framework: Framework, nvcc: Path) -> str | None:
    """Comma-separated capabilities that the framework's own kernels and ``nvcc`` share.

    None when the two have none in common or do not say: Horovod then takes all that nvcc knows.
    Raises :class:`BuildError` when nvcc cannot be run.
    """
    known = _numbers(r"compute_(\d+)\b", _said([str(nvcc), "--list-gpu-arch"]))
    if not known:
        raise BuildError(
            f"{nvcc} --list-gpu-arch names no GPU, so it cannot compile for one. Check the CUDA "
            f"toolkit, or build without GPU operations: --gpu none. "
            f"{CUDA_LIST_VARIABLE} chooses the capabilities without asking nvcc."
        )
    return ",".join(map(str, sorted(known & _of_framework(framework)))) or None


def _of_framework(framework: Framework) -> set[int]:
    if framework.name == "torch":
        return _numbers(r"sm_(\d+)\b", _said([sys.executable, "-c", _TORCH]))
    folder = package_folder(framework.name)
    if folder is None:
        return set()
    path = folder / "python" / "platform" / "build_info.py"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    listed = re.search(r"'cuda_compute_capabilities',\s*\[([^\]]*)\]", text)
    return _numbers(r"(?:sm|compute)_(\d+)\b", listed.group(1) if listed else "")


def _numbers(pattern: str, text: str) -> set[int]:
    return {int(number) for number in re.findall(pattern, text)}


def _said(command: list[str]) -> str:
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_LIMIT_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""
