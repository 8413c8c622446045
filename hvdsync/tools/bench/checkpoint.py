"""What a checkpoint costs: steps with a save among them, in the background, at once, or none."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hvdsync.comm import verbs, world
from hvdsync.tools.bench import environment
from hvdsync.tools.bench.compared import Compared
from hvdsync.tools.bench.report import Report, Table
from hvdsync.tools.bench.turns import take_turns

_NONE = "no checkpoint"
_PLAIN, _AT_ONCE, _BACKGROUND = "torch.save on rank 0", "saved at once", "saved in the background"


@dataclass(frozen=True)
class Settings:
    """What is measured; see ``python -m hvdsync bench checkpoint --help``."""

    model: str = "wide"
    every: int = 200
    rounds: int = 10
    directory: Path | None = None


def measure(settings: Settings) -> Report:
    """Time ``every`` steps and a save at a go, in turns, and some restores; collective."""
    import hvdsync.torch as hvd

    hvd.init()
    ranks = hvd.size()
    with ExitStack() as stack:
        # Rank 0 alone writes; the others' folder stays empty.
        parent = settings.directory
        made = stack.enter_context(tempfile.TemporaryDirectory(dir=parent))
        ways = _Ways(settings, Path(made), stack)
        seconds = take_turns(ways.all(), rounds=settings.rounds, seconds=1e-9, first=_NONE)
        restores = ways.time_restores(min(settings.rounds, 5))
        size = ways.bytes_on_disk()
    hvd.shutdown()
    return make_report(settings, Compared(seconds, _NONE), restores, size, ranks)


class _Ways:
    def __init__(self, settings: Settings, folder: Path, stack: ExitStack) -> None:
        import torch

        import hvdsync.torch as hvd
        from hvdsync.tools.bench import torch_models

        self._every = settings.every
        self._folder = folder
        batch = torch_models.batch_for(settings.model, seed=hvd.rank())
        model = torch_models.make(settings.model)
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        self._model, self._optimizer = hvd.distribute(model, optimizer)
        self._step = torch_models.training_step(self._model, self._optimizer, batch)
        self._at_once, self._background = (
            stack.enter_context(hvd.Checkpoint(folder / name, keep=1, background=background))
            for name, background in (("at-once", False), ("background", True))
        )
        self._saves = 0

    def all(self) -> dict[str, Callable[[], None]]:
        """Steps, and after them what each way does."""
        return {
            _NONE: self._with(lambda: None),
            _PLAIN: self._with(self._save_plainly),
            _AT_ONCE: self._with(lambda: self._save(self._at_once)),
            _BACKGROUND: self._with(lambda: self._save(self._background)),
        }

    def _with(self, save: Callable[[], None]) -> Callable[[], None]:
        def steps_and_save() -> None:
            for _ in range(self._every):
                self._step()
            save()

        return steps_and_save

    def _save_plainly(self) -> None:
        import torch

        if world.current().rank == 0:
            state = [self._model.state_dict(), self._optimizer.state_dict()]
            torch.save(state, self._folder / "plain.pt")

    def _save(self, checkpoint: object) -> None:
        self._saves += 1
        checkpoint.save(self._saves, model=self._model, optimizer=self._optimizer)  # type: ignore[attr-defined]

    def time_restores(self, count: int) -> list[float]:
        """Seconds of each, on the slowest rank."""
        taken = []
        for _ in range(count):
            world.current().barrier()
            started = time.perf_counter()
            self._at_once.restore(model=self._model, optimizer=self._optimizer)
            taken.append(max(verbs.allgather_object(time.perf_counter() - started)))
        return taken

    def bytes_on_disk(self) -> int:
        """Of one checkpoint, as rank 0 sees it."""
        newest = sorted((self._folder / "at-once").glob("step-*"))[-1:]
        own = sum(path.stat().st_size for folder in newest for path in folder.iterdir())
        return int(max(verbs.allgather_object(own)))


def make_report(
    settings: Settings, compared: Compared, restores: list[float], size: int, ranks: int
) -> Report:
    """The report of what was measured."""
    about = (
        f"{settings.every} steps of {settings.model} in PyTorch with one save after them, {ranks} "
        f"worker(s); a checkpoint is {size / 1e6:.0f} MB. Medians of {settings.rounds} rounds in "
        "which all took turns; a ratio that noise hides is not told."
    )
    base = compared.seconds[_NONE]
    rows = []
    for name in (_PLAIN, _AT_ONCE, _BACKGROUND):
        longer = [
            with_ - without for with_, without in zip(compared.seconds[name], base, strict=True)
        ]
        low, high = min(longer), max(longer)
        spread = f"{1000 * low:.0f} to {1000 * high:.0f}"
        rows.append((name, f"{1000 * median(longer):.0f}", spread))
    rows.append(
        (
            "restored on all ranks",
            f"{1000 * median(restores):.0f}",
            f"{1000 * min(restores):.0f} to {1000 * max(restores):.0f}",
        )
    )
    return Report(
        "checkpoint",
        [about],
        environment.describe(model=settings.model),
        [
            compared.table(f"{settings.every} steps and a save"),
            Table("By how much training stands still for one", ["", "ms", "in all rounds"], rows),
        ],
        [compared.chart(f"Time of {settings.every} steps and a save, over steps alone")],
        {
            "settings": {**vars(settings), "directory": str(settings.directory or "")},
            "ranks": ranks,
            "bytes": size,
            "seconds of a restore": restores,
            **compared.numbers(),
        },
    )
