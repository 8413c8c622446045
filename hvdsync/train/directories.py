"""Where a run keeps its checkpoints: the config in, one folder that all ranks agree on out."""

from __future__ import annotations

from pathlib import Path

from hvdsync.checkpoint.store import Store
from hvdsync.comm import verbs
from hvdsync.errors import CheckpointError
from hvdsync.train.agreement import together
from hvdsync.train.config import TrainConfig

RUNS = Path("runs")


def choose_directory(config: TrainConfig) -> Path:
    """The folder of this run; rank 0 looks at its disk and the others learn the outcome.

    ``--checkpoint-dir`` is taken as it is. Without it each run gets the next free number in
    ``runs/<data set>-<model>-<framework>``, or with ``--resume`` the newest one that holds a
    checkpoint, if there is one. Raises on every rank when ``--no-resume`` would mix the checkpoints
    of a new run with those of an earlier one, or the folder cannot be made.
    """
    chosen = together(lambda: _choose(config) if verbs.rank() == 0 else None)
    directory: Path = verbs.broadcast_object(chosen, 0, "hvdsync.train.directory")
    return directory


def _choose(config: TrainConfig) -> Path:
    if config.checkpoint_dir is not None:
        steps = Store(config.checkpoint_dir, 1).steps()
        if steps and not config.resumes:
            raise CheckpointError(
                f"--no-resume: {config.checkpoint_dir} holds the checkpoint of step {steps[-1]} of "
                "an earlier run; leave the option out to go on from it, or give another "
                "--checkpoint-dir"
            )
        return config.checkpoint_dir
    family = RUNS / f"{Path(config.dataset).stem}-{config.model}-{config.framework}"
    numbers = _numbers(family)
    if config.resumes:
        for number in reversed(numbers):
            if Store(family / str(number), 1).steps():
                return family / str(number)
    number = max(numbers, default=0)
    while True:  # another run may take a number at the same moment
        number += 1
        try:
            (family / str(number)).mkdir(parents=True)
        except FileExistsError:
            continue
        return family / str(number)


def _numbers(family: Path) -> list[int]:
    if not family.is_dir():
        return []
    return sorted(int(entry.name) for entry in family.iterdir() if entry.name.isdecimal())
