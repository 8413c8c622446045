"""Checkpoints on disk: a folder per step that appears whole or not at all.

A function that writes files goes in, a verified folder comes out; nothing here knows of ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import hvdsync
from hvdsync.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
_STEP = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"


class Store:
    """The checkpoints of one run in ``directory``, the ``keep`` newest of them."""

    def __init__(self, directory: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"Checkpoint: keep is {keep}; expected 1 or more")
        self.directory = directory
        self.keep = keep
        self._lock: FileLock | None = None

    def write(self, step: int, fill: Callable[[Path], None], about: Mapping[str, Any]) -> Path:
        """Write a checkpoint: ``fill(folder)`` puts its files into an empty folder.

        The files are synchronised to disk and listed in a manifest with their SHA-256 before the
        folder gets its final name; then older checkpoints beyond ``keep`` go. ``about`` is kept
        in the manifest. Raises :class:`CheckpointError` when the disk refuses, with the earlier
        checkpoints untouched.
        """
        final = self.directory / f"step-{step:08d}"
        unfinished = self.directory / f"{_UNFINISHED}{final.name}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock_for_writing()
            self._sweep()
            unfinished.mkdir()
            fill(unfinished)
            self._write_manifest(unfinished, step, about)
            self._put_in_place(unfinished, final)
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {self.directory}: {error}; "
                "earlier checkpoints are untouched. Make room or choose another directory"
            ) from error
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self._drop_old()
        return final

    def steps(self) -> list[int]:
        """Steps that have a folder, oldest first; whether it is whole is not looked at."""
        if not self.directory.is_dir():
            return []
        found = (_STEP.fullmatch(entry.name) for entry in self.directory.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def folder(self, step: int) -> Path:
        """The folder of a step, whether it exists or not."""
        return self.directory / f"step-{step:08d}"

    def newest_whole(self) -> tuple[Path, dict[str, Any]] | None:
        """The newest checkpoint that verifies, and its manifest; None when there is none.

        A damaged one is named in a warning, and the one before it is taken.
        """
        for step in reversed(self.steps()):
            try:
                return self.folder(step), self.verify(self.folder(step))
            except CheckpointError as error:
                logger.warning("%s; trying the checkpoint before it", error)
        return None

    def verify(self, folder: Path) -> dict[str, Any]:
        """The manifest of a folder whose files all have the size and SHA-256 that it lists.

        Raises :class:`CheckpointError` naming the file, what was found and what was expected.
        """
        manifest = _read_manifest(folder)
        for name, expected in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                raise CheckpointError(f"checkpoint {folder} is damaged: file {name} is missing")
            found = _fingerprint(path)
            if found != expected:
                raise CheckpointError(
                    f"checkpoint {folder} is damaged: file {name} has {found['bytes']} bytes and "
                    f"SHA-256 {found['sha256']}, expected {expected['bytes']} bytes and "
                    f"{expected['sha256']}"
                )
        return manifest

    def close(self) -> None:
        """Let another job write here."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _lock_for_writing(self) -> None:
        if self._lock is not None:
            return
        # One lock object per path and process: a second Checkpoint of this job is no stranger.
        lock = FileLock(self.directory / ".lock", is_singleton=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise CheckpointError(
                f"another job is writing checkpoints to {self.directory}; "
                "stop it, or give this one a directory of its own"
            ) from None
        self._lock = lock

    def _sweep(self) -> None:
        """Remove what a killed run left unfinished; bring back a folder it had set aside."""
        for entry in self.directory.iterdir():
            if entry.name.startswith(_UNFINISHED):
                shutil.rmtree(entry)
            elif entry.name.startswith(_REPLACED):
                final = self.directory / entry.name.removeprefix(_REPLACED)
                if final.exists():
                    shutil.rmtree(entry)
                else:
                    entry.rename(final)

    def _write_manifest(self, folder: Path, step: int, about: Mapping[str, Any]) -> None:
        files = {}
        for path in _files(folder):
            _sync(path)
            files[path.relative_to(folder).as_posix()] = _fingerprint(path)
        manifest = {
            "format": FORMAT,
            "step": step,
            "hvdsync": hvdsync.__version__,
            **about,
            "files": files,
        }
        path = folder / MANIFEST
        path.write_text(json.dumps(manifest, indent=2) + "\n")
        _sync(path)
        for inner in sorted({folder, *(p.parent for p in _files(folder))}):
            _sync(inner)

    def _put_in_place(self, unfinished: Path, final: Path) -> None:
        replaced = self.directory / f"{_REPLACED}{final.name}"
        if final.exists():
            final.rename(replaced)
        unfinished.rename(final)
        _sync(self.directory)
        if replaced.exists():
            shutil.rmtree(replaced)

    def _drop_old(self) -> None:
        for step in self.steps()[: -self.keep]:
            try:
                shutil.rmtree(self.folder(step))
            except OSError as error:
                logger.warning("old checkpoint %s could not be removed: %s", step, error)


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        found = manifest["format"]
        manifest["files"]
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {folder} is not whole: it has no {MANIFEST}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {folder} is damaged: {MANIFEST} does not read ({error!r})"
        ) from error
    if found != FORMAT:
        raise CheckpointError(
            f"checkpoint {folder} has layout version {found}, and this hvdsync reads {FORMAT}; "
            f"it was written by hvdsync {manifest.get('hvdsync', 'unknown')}"
        )
    return manifest


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}


def _sync(path: Path) -> None:
    """Ask the disk to keep a file's, or a directory's, content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
