"""The collective verb: state of all ranks in, one checkpoint on disk, the same state out again.

Rank 0 alone touches the disk; every rank learns whether it worked.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from hvdsync.checkpoint import per_rank, plain
from hvdsync.checkpoint.background import Background
from hvdsync.checkpoint.codec import Codec
from hvdsync.checkpoint.store import Store
from hvdsync.checkpoint.verdict import naming, on_every_rank, on_rank_zero
from hvdsync.comm import clock, world
from hvdsync.errors import CheckpointError

logger = logging.getLogger(__name__)

VALUES = "values.json"
Whole = tuple[Path, dict[str, Any]] | None


class Checkpoint:
    """Checkpoints of one run in ``directory``; every method is collective.

    Arguments:
        directory: where rank 0 writes; it need not be visible to the others. Made when needed.
        keep: how many of the newest checkpoints stay; older ones go after a newer is complete.
        every: :meth:`save` does nothing unless ``step`` is a multiple of it; None saves always.
        background: :meth:`save` returns once the state is copied, and a thread of rank 0 writes
            it. One save is in flight at a time. What fails there is raised, on every rank, by the
            next ``save``, ``restore``, ``restore_best``, ``latest``, ``best``, ``wait`` or
            ``close``.
        best: name of a plain value of ``state``; the checkpoint in which it is best stays beyond
            ``keep``. A NaN is never best; of equal ones the first stays.
        mode: whether the "max" or the "min" of that value is best.
        codec: how the framework's objects become files; each front door has its own.

    As a context manager it closes itself.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int = 3,
        every: int | None = None,
        *,
        background: bool = False,
        best: str | None = None,
        mode: Literal["max", "min"] = "max",
        codec: Codec | None = None,
    ) -> None:
        if every is not None and every < 1:
            raise ValueError(f"Checkpoint: every is {every}; expected None, or 1 or more steps")
        if mode not in ("max", "min"):
            raise ValueError(f"Checkpoint: mode is {mode!r}; expected 'max' or 'min'")
        self.directory = Path(directory)
        self.every = every
        self._metric = best
        self._sign = 1 if mode == "max" else -1
        self._store = Store(self.directory, keep, spare=lambda: self._ranked()[:1])
        self._codec = self._make_codec() if codec is None else codec
        self._background = Background() if background else None

    @staticmethod
    def _make_codec() -> Codec:
        raise NotImplementedError("import Checkpoint from a front door: hvdsync.torch, ...")

    @clock.spend("checkpoint")
    def save(self, step: int, **state: Any) -> Path | None:
        """Write a checkpoint of ``state`` at ``step``; gives back its folder.

        ``state`` holds the framework's objects (models, optimizers, schedulers, ...), objects
        with ``per_rank = True`` and plain values that JSON can hold. Rank 0's are written, of
        per-rank objects those of all ranks. With ``background`` the folder is there after the
        next :meth:`wait`. Returns None, and nothing travels, when ``every`` says that this step is
        not saved. On the wire: one all-gather of the per-rank states, one small broadcast, the
        verdict.

        Replicas that an update rule lets differ are made equal first, where their optimizer is
        given, itself or in a compiled model (``synchronize_replicas()``).

        Raises :class:`CheckpointError` on every rank when rank 0 could not write, or when the save
        in flight failed; this one is not begun then. Earlier checkpoints are untouched.
        """
        if self.every is not None and step % self.every:
            return None
        _meet(state)
        states = per_rank.gather(state)
        _, folder = on_rank_zero(
            lambda: self._begin(step, state, states), tell=lambda folder: folder, name="save"
        )
        return folder

    def restore(self, **state: Any) -> dict[str, Any] | None:
        """Put the newest whole checkpoint into ``state``'s objects, on every rank.

        Rank 0 reads and verifies; the others get it over the wire, in chunks. Gives back the
        plain values that were saved, the given objects, and ``step``; None when there is no
        checkpoint. A damaged checkpoint is named in a warning and the one before it is taken.
        Per-rank objects get their own rank's state; at another world size than that of the save
        they stay as they are, and rank 0 says so in a warning.

        Raises :class:`CheckpointError` on every rank when something in ``state`` was not saved
        or does not fit.
        """
        return self._restore(self._store.newest_whole, state)

    def restore_best(self, **state: Any) -> dict[str, Any] | None:
        """As :meth:`restore`, from the checkpoint in which the metric ``best`` is best."""
        self._require_metric("restore_best")
        return self._restore(self._best_whole, state)

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint, or None; rank 0 looks, every rank learns.

        The newest is the one written last: after a return to an earlier step, that branch's.
        """
        return self._step_of(self._store.newest_whole, "latest")

    def best(self) -> int | None:
        """The step of the whole checkpoint in which the metric ``best`` is best, or None."""
        self._require_metric("best")
        return self._step_of(self._best_whole, "best")

    @clock.spend("checkpoint")
    def wait(self) -> None:
        """Return when no save is in flight; raises on every rank when the last one failed."""
        if self._background is not None:
            on_rank_zero(self._finish, tell=lambda _: None, name="wait")

    def close(self) -> None:
        """Wait for the save in flight and let another job write to the directory.

        Collective, and raises like :meth:`wait`, with one exception: called while an exception is
        on its way (from a ``finally`` or a ``with``), nothing travels, since the other ranks may
        not come here. Rank 0 then waits for its own thread, and logs what failed in it.
        """
        self._close(sys.exception())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close(error)

    def _close(self, on_its_way: BaseException | None) -> None:
        try:
            if on_its_way is None:
                self.wait()
                return
            try:
                self._finish()
            except CheckpointError as failure:
                # An exit asked for in good order must not look like one.
                if isinstance(on_its_way, SystemExit):
                    raise
                logger.error("%s", failure)
        finally:
            self._store.close()

    def _begin(self, step: int, state: dict[str, Any], states: list[dict[str, Any]]) -> Path:
        try:
            self._finish()
        except CheckpointError as failure:
            raise CheckpointError(f"step {step} was not saved; {failure}") from failure
        self._store.claim()
        write = self._prepare(step, state, states)
        if self._background is None:
            return write()
        self._background.start(write, f"the checkpoint of step {step}")
        return self._store.folder(step)

    def _finish(self) -> None:
        if self._background is not None:
            self._background.finish()

    def _prepare(
        self, step: int, state: dict[str, Any], states: list[dict[str, Any]]
    ) -> Callable[[], Path]:
        """Take what is to be written at ``step``; the action that is given back writes it."""
        take = self._codec.view if self._background is None else self._codec.snapshot
        parts, values = {}, {}
        for name, obj in state.items():
            if per_rank.is_per_rank(obj):
                continue
            if self._codec.handles(obj):
                parts[name] = take(name, obj)
            else:
                values[name] = obj
        kinds = ", ".join(f"{name}: {type(value).__name__}" for name, value in values.items())
        text = plain.to_json(
            values,
            f"checkpoint of step {step}: besides the framework's objects only plain values can be "
            f"saved, and these were given: {kinds}",
        )
        if self._metric is not None:
            _refuse_metric(self._metric, values.get(self._metric), step)
        about = {
            "epoch": values.get("epoch"),
            "world_size": world.current().size,
            "versions": dict(self._codec.versions()),
            "items": list(parts),
            "per_rank": list(states[0]),
        }

        def fill(folder: Path) -> None:
            (folder / VALUES).write_text(text)
            if states[0]:
                per_rank.write(folder, states)
            for name, part in parts.items():
                self._codec.write(folder, name, part)

        return lambda: self._store.write(step, fill, about)

    def _restore(self, find: Callable[[], Whole], state: dict[str, Any]) -> dict[str, Any] | None:
        found, header = on_rank_zero(
            lambda: self._read(find, state),
            tell=lambda found: found and {k: v for k, v in found.items() if k not in _BULK},
            name="restore",
        )
        if header is None:
            return None
        trees = found["trees"] if found is not None else dict.fromkeys(header["items"])
        for name in header["items"]:
            trees[name] = self._codec.broadcast(trees[name], f"hvdsync.checkpoint.{name}")
        own = None
        if header["per_rank"]:
            own = per_rank.deal_out(found and found["states"], header["per_rank"])
        given = {name: state[name] for name in (*header["items"], *header["per_rank"])}
        self._apply(given, trees, own or {})
        return {**header["values"], **given, "step": header["step"]}

    def _read(self, find: Callable[[], Whole], state: dict[str, Any]) -> dict[str, Any] | None:
        self._finish()
        newest = find()
        if newest is None:
            return None
        folder, manifest = newest
        own = [name for name, obj in state.items() if per_rank.is_per_rank(obj)]
        asked = [
            name for name, obj in state.items() if name not in own and self._codec.handles(obj)
        ]
        held = [*manifest["items"], *manifest.get("per_rank", ())]
        absent = [name for name in (*asked, *own) if name not in held]
        if absent:
            raise CheckpointError(
                f"checkpoint {folder} holds {', '.join(held) or 'no objects'}, but "
                f"not {', '.join(absent)}; restore what was saved"
            )
        return {
            "step": manifest["step"],
            "values": json.loads((folder / VALUES).read_text()),
            "items": asked,
            "per_rank": own,
            "trees": {name: self._codec.read(folder, name, state[name]) for name in asked},
            "states": per_rank.read(folder) if own else None,
        }

    def _apply(self, given: dict[str, Any], trees: dict[str, Any], own: dict[str, Any]) -> None:
        def check() -> None:
            for name, tree in trees.items():
                with naming(name):
                    self._codec.check(given[name], tree)

        def apply() -> None:
            for name, tree in trees.items():
                with naming(name):
                    self._codec.apply(given[name], tree)
            # Last: to build and to load may draw random numbers.
            for name, state in own.items():
                with naming(name):
                    given[name].load_state_dict(state)

        # Each on all ranks before the next: what does not fit somewhere is put in nowhere, and a
        # rank that fails alone must not leave the others training.
        label = f"the checkpoint in {self.directory}"
        on_every_rank(check, label)
        on_every_rank(apply, label)

    def _step_of(self, find: Callable[[], Whole], name: str) -> int | None:
        def look() -> Whole:
            self._finish()
            return find()

        _, step = on_rank_zero(look, tell=lambda found: found and found[1]["step"], name=name)
        return step

    def _best_whole(self) -> Whole:
        return self._store.first_whole(self._ranked())

    def _ranked(self) -> list[int]:
        """Steps that have the metric, the best first."""
        if self._metric is None:
            return []
        scored = []
        for step in self._store.history():
            try:
                value = json.loads((self._store.folder(step) / VALUES).read_text())[self._metric]
                if not math.isnan(value):
                    scored.append((self._sign * value, step))
            except (OSError, ValueError, TypeError, KeyError):
                continue  # damaged, or of a run without this metric
        return [step for _, step in sorted(scored, key=lambda pair: -pair[0])]

    def _require_metric(self, method: str) -> None:
        if self._metric is None:
            raise ValueError(f"Checkpoint.{method}: name the metric, as in Checkpoint(best='loss')")


def _meet(state: dict[str, Any]) -> None:
    """Make replicas equal: what is saved of rank 0 is to be what all have worked for."""
    for obj in state.values():
        for holder in (obj, getattr(obj, "optimizer", None)):
            synchronize = getattr(holder, "synchronize_replicas", None)
            if synchronize is not None:
                synchronize()


# What of a reading does not travel with its header.
_BULK = ("trees", "states")


def _refuse_metric(name: str, value: Any, step: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(
            f"checkpoint of step {step}: best={name!r} needs a number of that name among the plain "
            f"values, and found {value!r}"
        )
