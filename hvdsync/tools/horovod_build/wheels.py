"""Wheels: record in one what was built, and make one of several.

In: wheels that hold the same Python files and each another extension. Out: a wheel with a right
RECORD that holds them all, whose ``metadata.json`` says what each was built for.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hvdsync.errors import BuildError
from hvdsync.tools.horovod_build.patches import QUESTIONS, RECORD

METADATA = Path("horovod") / "metadata.json"


def _wheel_tool(*arguments: str) -> None:
    command = [sys.executable, "-m", "wheel", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(
            f"`{' '.join(command[1:])}` failed: {result.stderr.strip() or result.stdout.strip()}"
        )


def unpack_wheel(wheel: Path, folder: Path) -> Path:
    """Unpack into ``folder``, checking every file against RECORD; return the tree."""
    _wheel_tool("unpack", "--dest", str(folder), str(wheel))
    return next(path for path in folder.iterdir() if path.is_dir())


def pack_wheel(tree: Path, folder: Path) -> Path:
    """Pack a tree into a wheel inside ``folder``, with RECORD written anew."""
    folder.mkdir(parents=True, exist_ok=True)
    _wheel_tool("pack", "--dest-dir", str(folder), str(tree))
    return next(folder.glob("*.whl"))


def read_metadata(tree: Path) -> dict[str, Any]:
    """Horovod's ``metadata.json`` of an unpacked wheel or of site-packages; {} when absent."""
    try:
        content = json.loads((tree / METADATA).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_metadata(tree: Path, content: dict[str, Any]) -> None:
    """Write ``metadata.json`` beside Horovod's packages."""
    (tree / METADATA).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def extension_files(tree: Path, framework: str) -> list[Path]:
    """The compiled extension of a framework inside a tree (none or one file)."""
    return sorted((tree / "horovod" / framework).glob("mpi_lib*.so"))


def record(tree: Path, framework: str, entry: dict[str, Any]) -> None:
    """Add what an extension was built for, and its answers, to the tree's ``metadata.json``."""
    content = read_metadata(tree)
    content.setdefault(RECORD, {}).setdefault("extensions", {})[framework] = entry
    write_metadata(tree, content)


def ask_extension(tree: Path, framework: str, library_folders: Sequence[Path]) -> dict[str, bool]:
    """Horovod's questions and the extension's answers, asked once in a child process.

    The tree is not installed yet, so its relative run paths lead nowhere: ``library_folders`` go
    before the loader's own. Raises :class:`BuildError` when the extension cannot be loaded.
    """
    code = (
        "import importlib, json\n"
        f"extension = importlib.import_module('horovod.{framework}')\n"
        f"questions = {QUESTIONS!r}\n"
        "answers = {text: bool(getattr(extension, name)()) for text, name in questions.items()}\n"
        "print('\\n' + json.dumps({'built': True, **answers}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tree), "TF_CPP_MIN_LOG_LEVEL": "3"}
    paths = [str(path) for path in library_folders]
    paths += [environment["LD_LIBRARY_PATH"]] if environment.get("LD_LIBRARY_PATH") else []
    if paths:
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    with tempfile.TemporaryDirectory() as elsewhere:
        # Started elsewhere, so that no folder of the caller shadows the tree.
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            cwd=elsewhere,
        )
    if result.returncode:
        tail = "\n".join(result.stderr.strip().splitlines()[-8:])
        raise BuildError(f"The extension just built for {framework} cannot be loaded:\n{tail}")
    answers: dict[str, bool] = json.loads(result.stdout.strip().splitlines()[-1])
    return answers


def merge(wheels: dict[str, Path], folder: Path) -> Path:
    """Make one wheel of one wheel per framework.

    ``wheels`` maps framework to wheel; the first gives the Python files. Returns the new wheel
    inside ``folder``. Raises :class:`BuildError` when a wheel lacks its extension.
    """
    folder.mkdir(parents=True, exist_ok=True)
    base: Path | None = None
    with tempfile.TemporaryDirectory(dir=folder) as private:
        for framework, wheel in wheels.items():
            tree = unpack_wheel(wheel, Path(private) / framework)
            extensions = extension_files(tree, framework)
            if not extensions:
                raise BuildError(f"{wheel} holds no extension for {framework}; delete it.")
            if base is None:
                base = tree
                continue
            for path in extensions:
                os.replace(path, base / path.relative_to(tree))
            _merge_metadata(base, read_metadata(tree))
        if base is None:
            raise BuildError("There is no wheel to install.")
        return pack_wheel(base, folder)


def _merge_metadata(base: Path, other: dict[str, Any]) -> None:
    content = read_metadata(base)
    extensions = {
        **content.get(RECORD, {}).get("extensions", {}),
        **other.get(RECORD, {}).get("extensions", {}),
    }
    content = {**content, **other, RECORD: {"extensions": extensions}}
    write_metadata(base, content)
