"""The checkpoints of a training run: where it stands and a worker's objects in, and out again.

Every method is collective; what fails on one rank is raised on all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdsync.comm import verbs
from hvdsync.data.sampler import DistributedSampler
from hvdsync.errors import CheckpointError
from hvdsync.train.agreement import together
from hvdsync.train.config import TrainConfig
from hvdsync.train.worker import ERROR_FEEDBACK, Worker

# Going on with another of these would mean other weights, other samples or a useless state.
_IDENTITY = ("framework", "model", "dataset", "optimizer", "seed", "dropout")


@dataclass
class Position:
    """Where a run stands. ``step`` counts optimizer steps, ``epochs`` those that were trained and
    evaluated; ``best`` is the highest test accuracy so far and the epoch (from 1) that had it.

    ``sums`` are this rank's, of the epoch under way, when it has begun; ``trained`` says that
    nothing is missing from it but its evaluation.
    """

    step: int = 0
    epochs: int = 0
    best: dict[str, Any] = field(default_factory=lambda: {"accuracy": 0.0, "epoch": 0})
    sums: list[float] | None = None
    trained: bool = False

    @property
    def within_epoch(self) -> bool:
        """Whether an epoch has begun and is not over."""
        return self.sums is not None

    def evaluated(self, accuracy: float) -> None:
        """One more epoch is over."""
        self.epochs += 1
        self.sums, self.trained = None, False
        if accuracy > self.best["accuracy"] or not self.best["epoch"]:
            self.best = {"accuracy": accuracy, "epoch": self.epochs}


class Keeper:
    """Saves and restores one run in ``directory``; saves go to disk while training goes on."""

    def __init__(self, config: TrainConfig, worker: Worker, directory: Path) -> None:
        self._config = config
        self._worker = worker
        self._directory = directory
        # Workers of an elastic run that joined would not know of a save under way.
        self._checkpoint = worker.checkpoint(
            directory, background=not config.elastic, best="test_accuracy"
        )

    def save(
        self, position: Position, data: Mapping[str, Any], test_accuracy: float = math.nan
    ) -> Path:
        """Save the worker and ``position``, with ``data``, the sampler's state; gives the folder.

        The one of highest ``test_accuracy`` is kept beside the newest. Within an epoch the sums of
        all ranks are gathered, some numbers each.
        """
        sums = None
        if position.within_epoch:
            sums = verbs.allgather_object(position.sums, "hvdsync.train.sums")

        def save() -> Path:
            folder: Path = self._checkpoint.save(
                position.step,
                **self._worker.state(),
                epoch=position.epochs,
                best=position.best,
                data=dict(data),
                sums=sums,
                test_accuracy=test_accuracy,
                config=plain(self._config),
            )
            return folder

        return together(save)

    def restore(self, sampler: DistributedSampler) -> Position | None:
        """Put the newest checkpoint into worker and sampler; None when there is none."""

        def restore() -> Position | None:
            # The plain values first: a checkpoint of another optimizer is best called that.
            values = self._checkpoint.restore()
            if values is None:
                return None
            self._refuse_another_run(values["config"])
            state = dict(self._worker.state())
            if values["config"].get("compression") != self._config.compression:
                # What one compressor did not send means nothing to another.
                state.pop(ERROR_FEEDBACK, None)
            values = self._checkpoint.restore(**state)
            sampler.load_state_dict(values["data"])
            position = Position(values["step"], values["epoch"], sums=own_sums(values.get("sums")))
            position.best = values.get("best", position.best)
            position.trained = position.within_epoch and values["data"]["epoch"] > position.epochs
            return position

        return together(restore)

    def close(self) -> None:
        """Wait until all is on disk."""
        together(self._checkpoint.close)

    def abandon(self) -> None:
        """Let go of the folder while an exception is on its way; on this rank alone."""
        self._checkpoint.close()

    def _refuse_another_run(self, saved: Mapping[str, Any]) -> None:
        mine = plain(self._config)
        for name in _IDENTITY:
            if saved.get(name) != mine[name]:
                raise CheckpointError(
                    f"the checkpoint in {self._directory} is of a run with "
                    f"--{name} {saved.get(name)}, not {mine[name]}; give the same, or another "
                    "--checkpoint-dir"
                )


def own_sums(everyone: Sequence[Sequence[float]] | None) -> list[float] | None:
    """This rank's share of sums that were saved by each rank; the total is kept at any size."""
    if everyone is None:
        return None
    if len(everyone) == verbs.size():
        return list(everyone[verbs.rank()])
    totals = [sum(values) for values in zip(*everyone, strict=True)]
    return totals if verbs.rank() == 0 else [0.0] * len(totals)


def plain(config: TrainConfig) -> dict[str, Any]:
    """The options as values that JSON can hold."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(config).items()}
