"""What a checkpoint's folder says of itself: files in, a manifest with their SHA-256 out, and back.

A folder is whole when its manifest reads, is of this layout, and every file is as it lists.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hvdsync
from hvdsync.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
_SEAL = "manifest_sha256"


class UnknownLayout(CheckpointError):
    """The checkpoint was written in a layout that this version does not read."""


def write(folder: Path, about: Mapping[str, Any]) -> None:
    """List the files of ``folder`` in a manifest with ``about``, and bring all of it to disk."""
    files = {}
    for path in _files(folder):
        synchronise(path)
        files[path.relative_to(folder).as_posix()] = _fingerprint(path)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "hvdsync": hvdsync.__version__,
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **about,
        "files": files,
    }
    manifest[_SEAL] = _seal(manifest)
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    synchronise(path)
    for inner in sorted({folder, *(p.parent for p in _files(folder))}):
        synchronise(inner)


def read(folder: Path) -> dict[str, Any]:
    """The manifest of a folder; its files are not looked at.

    Raises :class:`UnknownLayout`, or :class:`CheckpointError` when it is missing or damaged.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        found = manifest["format"]
        known = {
            name: {"bytes": file["bytes"], "sha256": file["sha256"]}
            for name, file in manifest["files"].items()
        }
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {folder} is not whole: it has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {MANIFEST} does not read ({error!r})"
        ) from error
    if found != FORMAT:
        raise UnknownLayout(
            f"checkpoint {folder} has layout version {found}, and this hvdsync "
            f"({hvdsync.__version__}) reads {FORMAT}; it was written by hvdsync "
            f"{manifest.get('hvdsync', 'unknown')}, which can read it"
        )
    # Checkpoints of the first versions carry no seal.
    if _SEAL in manifest and manifest[_SEAL] != _seal(manifest):
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {MANIFEST} is not what was written (its own "
            "SHA-256 does not fit)"
        )
    manifest["files"] = known
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a folder whose files all have the size and SHA-256 that it lists.

    Raises :class:`CheckpointError` naming the file, what was found and what was expected.
    """
    manifest = read(folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {folder} is damaged: file {name} is missing")
        try:
            found = _fingerprint(path)
        except OSError as error:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: file {name} does not read ({error})"
            ) from error
        if found != expected:
            raise CheckpointError(
                f"checkpoint {folder} is damaged: file {name} has {found['bytes']} bytes and "
                f"SHA-256 {found['sha256']}, expected {expected['bytes']} bytes and "
                f"{expected['sha256']}"
            )
    return manifest


def synchronise(path: Path) -> None:
    """Ask the disk to keep a file's, or a directory's, content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _seal(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of what a manifest says besides, however it is laid out as text."""
    said = {key: value for key, value in manifest.items() if key != _SEAL}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
