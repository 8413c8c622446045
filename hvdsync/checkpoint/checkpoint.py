"""The collective verb: state of all ranks in, one checkpoint on disk, the same state out again.

Rank 0 alone touches the disk; every rank learns whether it worked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdsync.checkpoint.codec import Codec
from hvdsync.checkpoint.store import Store
from hvdsync.comm import verbs, world
from hvdsync.errors import CheckpointError, HvdsyncError

_VALUES = "values.json"


class Checkpoint:
    """Checkpoints of one run in ``directory``; every method is collective.

    Arguments:
        directory: where rank 0 writes; it need not be visible to the others. Made when needed.
        keep: how many of the newest checkpoints stay; older ones go after a newer is complete.
        every: :meth:`save` does nothing unless ``step`` is a multiple of it; None saves always.
        codec: how the framework's objects become files; the front doors hand in their own.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        every: int | None = None,
        *,
        codec: Codec,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"Checkpoint: every is {every}; expected None, or 1 or more steps")
        self.directory = Path(directory)
        self.every = every
        self._store = Store(self.directory, keep)
        self._codec = codec

    def save(self, step: int, **state: Any) -> Path | None:
        """Write a checkpoint of ``state`` at ``step``; gives back its folder.

        ``state`` holds the framework's objects (models, optimizers, schedulers, ...) and plain
        values that JSON can hold. Rank 0's are written. Returns None, and nothing travels, when
        ``every`` says that this step is not saved. On the wire: one small broadcast, the verdict.

        Raises :class:`CheckpointError` on every rank when rank 0 could not write; earlier
        checkpoints are untouched then.
        """
        if self.every is not None and step % self.every:
            return None
        _, folder = _on_rank_zero(
            lambda: self._write(step, state), tell=lambda folder: folder, name="save"
        )
        return folder

    def restore(self, **state: Any) -> dict[str, Any] | None:
        """Put the newest whole checkpoint into ``state``'s objects, on every rank.

        Rank 0 reads and verifies; the others get it over the wire, in chunks. Gives back the
        plain values that were saved, the given objects, and ``step``; None when there is no
        checkpoint. A damaged checkpoint is named in a warning and the one before it is taken.

        Raises :class:`CheckpointError` on every rank when something in ``state`` was not saved
        or does not fit.
        """
        found, header = _on_rank_zero(
            lambda: self._read(state),
            tell=lambda found: found and (found["step"], found["values"], list(found["trees"])),
            name="restore",
        )
        if header is None:
            return None
        step, values, names = header
        given = {name: state[name] for name in names}
        trees = found["trees"] if found is not None else dict.fromkeys(names)
        for name in names:
            trees[name] = self._codec.broadcast(trees[name], f"hvdsync.checkpoint.{name}")
        self._apply(given, trees)
        return {**values, **given, "step": step}

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint, or None; rank 0 looks, every rank learns."""
        _, step = _on_rank_zero(
            self._store.newest_whole,
            tell=lambda newest: newest and newest[1]["step"],
            name="latest",
        )
        return step

    def close(self) -> None:
        """Let another job write to the directory."""
        self._store.close()

    def _write(self, step: int, state: dict[str, Any]) -> Path:
        snapshots = {
            name: self._codec.snapshot(name, obj)
            for name, obj in state.items()
            if self._codec.handles(obj)
        }
        values = {name: value for name, value in state.items() if name not in snapshots}
        try:
            text = json.dumps(values, indent=2)
        except (TypeError, ValueError) as error:
            kinds = ", ".join(f"{name}: {type(value).__name__}" for name, value in values.items())
            raise CheckpointError(
                f"checkpoint of step {step}: {error}; besides the framework's objects only plain "
                f"values can be saved, and these were given: {kinds}"
            ) from error

        def fill(folder: Path) -> None:
            (folder / _VALUES).write_text(text + "\n")
            for name, snapshot in snapshots.items():
                self._codec.write(folder, name, snapshot)

        about = {"world_size": world.current().size, "items": list(snapshots)}
        return self._store.write(step, fill, about)

    def _read(self, state: dict[str, Any]) -> dict[str, Any] | None:
        newest = self._store.newest_whole()
        if newest is None:
            return None
        folder, manifest = newest
        asked = [name for name, obj in state.items() if self._codec.handles(obj)]
        absent = [name for name in asked if name not in manifest["items"]]
        if absent:
            raise CheckpointError(
                f"checkpoint {folder} holds {', '.join(manifest['items']) or 'no objects'}, but "
                f"not {', '.join(absent)}; restore what was saved"
            )
        return {
            "step": manifest["step"],
            "values": json.loads((folder / _VALUES).read_text()),
            "trees": {name: self._codec.read(folder, name, state[name]) for name in asked},
        }

    def _apply(self, given: dict[str, Any], trees: dict[str, Any]) -> None:
        failure = None
        try:
            for name, obj in given.items():
                self._codec.apply(obj, trees[name])
        except Exception as error:
            failure = CheckpointError(
                f"rank {world.current().rank}: the checkpoint in {self.directory} does not fit "
                f"{name!r}: {error}"
            )
            failure.__cause__ = error
        # A rank that fails alone must not leave the others training.
        failed_somewhere = verbs.agree_any(failure is not None)
        if failure is not None:
            raise failure
        if failed_somewhere:
            raise CheckpointError(
                f"rank {world.current().rank}: another rank could not use the checkpoint in "
                f"{self.directory}; its own message says why"
            )


def _on_rank_zero(
    action: Callable[[], Any], *, tell: Callable[[Any], Any], name: str
) -> tuple[Any, Any]:
    """Run ``action`` on rank 0: (its result there, else None), and ``tell`` of it on every rank.

    What it raises is raised on every rank: on rank 0 itself, elsewhere as its message.
    """
    result, told, failure = None, None, None
    if world.current().rank == 0:
        try:
            result = action()
            told = tell(result)
        except HvdsyncError as error:
            failure = error
        except Exception as error:  # whatever it is, the other ranks wait for the verdict
            failure = CheckpointError(f"checkpoint {name} failed: {error!r}")
            failure.__cause__ = error
    message = None if failure is None else str(failure)
    told, message = verbs.broadcast_object((told, message), 0, f"hvdsync.checkpoint.{name}")
    if failure is not None:
        raise failure
    if message is not None:
        raise CheckpointError(f"on rank 0: {message}")
    return result, told
