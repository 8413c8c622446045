"""Checkpoints on disk: a folder per step that appears whole or not at all.

A function that writes files goes in, a verified folder comes out; nothing here knows of ranks.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hvdsync.checkpoint import manifest
from hvdsync.checkpoint.manifest import UnknownLayout
from hvdsync.errors import CheckpointError, HvdsyncError

logger = logging.getLogger(__name__)

# A job that was killed a moment ago, or a child of it, may still hold the lock.
LOCK_SECONDS = 10.0
_STEP = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"
_DROPPED = ".dropped-"
_LOCK = ".lock"


@dataclass
class _Survey:
    """The steps that have a folder, by what their manifests say."""

    known: list[tuple[int, int]] = field(default_factory=list)  # (sequence, step), in order
    damaged: list[int] = field(default_factory=list)
    foreign: list[int] = field(default_factory=list)


class Store:
    """The checkpoints of one run in ``directory``, the ``keep`` newest of them.

    ``spare()`` names steps that stay although they are older. Newest means written last, which a
    run that went back to an earlier step does not do with the highest step.
    """

    def __init__(
        self, directory: Path, keep: int, spare: Callable[[], Iterable[int]] = tuple
    ) -> None:
        if keep < 1:
            raise ValueError(f"Checkpoint: keep is {keep}; expected 1 or more")
        self.directory = directory
        self.keep = keep
        self._spare = spare
        self._lock: FileLock | None = None
        self._locked: tuple[int, int] | None = None

    def claim(self) -> None:
        """Make the directory and let no other job write to it.

        Raises :class:`CheckpointError` when another job does, or when the disk refuses.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if self._lock is not None and self._identity() == self._locked:
                return
            if self._lock is not None:
                logger.warning(
                    "%s was removed while this job runs, with the checkpoints in it; it is made "
                    "anew",
                    self.directory,
                )
                self._lock.release(force=True)
                self._lock = None
            # One lock object per path and process: a second Checkpoint of this job is no stranger.
            lock = FileLock(self.directory / _LOCK, is_singleton=True, thread_local=False)
            first = not lock.is_locked
            lock.acquire(timeout=LOCK_SECONDS)
            self._lock, self._locked = lock, self._identity()
            if first:
                self._sweep()
        except Timeout:
            raise CheckpointError(
                f"another job is writing checkpoints to {self.directory}; "
                "stop it, or give this one a directory of its own"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be written to {self.directory}: {error}. Earlier ones are "
                "untouched; choose another directory"
            ) from error

    def write(self, step: int, fill: Callable[[Path], None], about: Mapping[str, Any]) -> Path:
        """Write a checkpoint: ``fill(folder)`` puts its files into an empty folder.

        The files are synchronised to disk and listed in a manifest with their SHA-256 before the
        folder gets its final name; then older checkpoints beyond ``keep`` go. ``about`` is kept
        in the manifest. Raises :class:`CheckpointError` when the disk refuses or ``fill`` fails,
        with the earlier checkpoints untouched.
        """
        self.claim()
        final = self._final(step)
        unfinished = self.directory / f"{_UNFINISHED}{final.name}"
        try:
            if unfinished.exists():
                shutil.rmtree(unfinished)
            unfinished.mkdir()
            fill(unfinished)
            sequence = max((sequence for sequence, _ in self._survey().known), default=0) + 1
            manifest.write(unfinished, {"step": step, "sequence": sequence, **about})
            self._put_in_place(unfinished, final)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if isinstance(error, HvdsyncError) or not isinstance(error, Exception):
                raise
            # Writers tell a full disk in their own ways, some without its name.
            raise CheckpointError(
                f"checkpoint of step {step} could not be written to {self.directory}: "
                f"{_reason(error)}{self._room()}; earlier checkpoints are untouched. Make room "
                "or choose another directory"
            ) from error
        self._drop_old(step)
        return final

    def steps(self) -> list[int]:
        """Steps that have a folder, in order; whether it is whole is not looked at."""
        if not self.directory.is_dir():
            return []
        names = {entry.name.removeprefix(_REPLACED) for entry in self.directory.iterdir()}
        return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)

    def history(self) -> list[int]:
        """Steps in the order in which they were written.

        Those whose manifest does not tell come last, where a reader meets and names them.
        """
        survey = self._survey()
        return [*(step for _, step in survey.known), *sorted(survey.damaged + survey.foreign)]

    def folder(self, step: int) -> Path:
        """The folder of a step, whether it exists or not."""
        final = self._final(step)
        aside = self.directory / f"{_REPLACED}{final.name}"
        # A run that was killed between two renames left the folder under this name.
        return aside if aside.exists() and not final.exists() else final

    def first_whole(self, steps: Iterable[int]) -> tuple[Path, dict[str, Any]] | None:
        """The first of ``steps`` that verifies, and its manifest; None when there is none.

        A damaged one is named in a warning.
        """
        for step in steps:
            try:
                return self.folder(step), self.verify(self.folder(step))
            except CheckpointError as error:
                logger.warning("%s; trying the checkpoint before it", error)
        return None

    def newest_whole(self) -> tuple[Path, dict[str, Any]] | None:
        """The checkpoint written last that verifies, and its manifest; None when there is none.

        A damaged one is named in a warning, and the one before it is taken.
        """
        tried: set[int] = set()
        # Again, while another job writes: what was listed may have gone, after a newer one came.
        while steps := [step for step in self.history() if step not in tried]:
            found = self.first_whole(reversed(steps))
            if found is not None:
                return found
            tried.update(steps)
        return None

    def verify(self, folder: Path) -> dict[str, Any]:
        """The manifest of a whole folder; see :func:`hvdsync.checkpoint.manifest.verify`."""
        found = manifest.verify(folder)
        if self._final(found["step"]).name != folder.name.removeprefix(_REPLACED):
            raise CheckpointError(
                f"checkpoint {folder} is damaged: its {manifest.MANIFEST} says step {found['step']}"
            )
        return found

    def close(self) -> None:
        """Let another job write here."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _final(self, step: int) -> Path:
        return self.directory / f"step-{step:08d}"

    def _identity(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.directory / _LOCK)
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _survey(self) -> _Survey:
        survey = _Survey()
        for step in self.steps():
            try:
                survey.known.append((manifest.read(self.folder(step)).get("sequence", 0), step))
            except UnknownLayout:
                survey.foreign.append(step)
            except CheckpointError:
                survey.damaged.append(step)
        survey.known.sort()
        return survey

    def _sweep(self) -> None:
        """Remove what a killed run left unfinished; bring back a folder it had set aside."""
        for entry in self.directory.iterdir():
            if entry.name.startswith((_UNFINISHED, _DROPPED)):
                shutil.rmtree(entry)
            elif entry.name.startswith(_REPLACED):
                final = self.directory / entry.name.removeprefix(_REPLACED)
                if final.exists():
                    shutil.rmtree(entry)
                else:
                    entry.rename(final)

    def _put_in_place(self, unfinished: Path, final: Path) -> None:
        aside = self.directory / f"{_REPLACED}{final.name}"
        if final.exists():
            final.rename(aside)
        try:
            unfinished.rename(final)
        except OSError:
            if aside.exists():
                aside.rename(final)
            raise
        manifest.synchronise(self.directory)
        if aside.exists():
            shutil.rmtree(aside)

    def _drop_old(self, newest: int) -> None:
        survey = self._survey()
        # Damaged ones go first; what another version wrote is not ours to remove.
        steps = [*survey.damaged, *(step for _, step in survey.known)]
        for step in sorted({*steps[: -self.keep]} - {newest, *self._spare()}):
            folder = self.folder(step)
            dropped = self.directory / f"{_DROPPED}{folder.name}"
            try:
                # Renamed first: half removed it would look damaged.
                folder.rename(dropped)
                shutil.rmtree(dropped)
            except OSError as error:
                logger.warning("old checkpoint %s could not be removed: %s", step, error)

    def _room(self) -> str:
        try:
            free = shutil.disk_usage(self.directory).free
        except OSError:
            return f" ({self.directory} is gone)"
        return f" ({free / 2**20:.1f} MiB are free there)"


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else repr(error)
