"""What a run tells while it goes on: facts and numbers in, to whoever shows or writes them.

Rank 0 alone has listeners; a listener never takes part in a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdsync.guard.straggler_report import StragglerReport
from hvdsync.train.config import TrainConfig
from hvdsync.train.worker import Tally


@dataclass(frozen=True)
class RunFacts:
    """What is known before the first step. ``first_epoch`` counts from 0, as epochs that are over;
    ``resumed_from`` is a step when the run goes on from a checkpoint, ``within_epoch`` says that an
    epoch was under way there."""

    config: TrainConfig
    workers: int
    device: str
    parameters: int
    train_samples: int
    test_samples: int
    first_epoch: int
    resumed_from: int | None
    directory: Path
    within_epoch: bool = False


@dataclass(frozen=True)
class Standing:
    """Where an epoch stands after a pass. ``samples`` are those of all ranks since it began, or
    was taken up; ``tally`` gives rank 0's sums, at some cost, so ask it seldom."""

    step: int
    samples: int
    seconds: float
    learning_rate: float
    tally: Callable[[], Tally]


@dataclass(frozen=True)
class EpochResult:
    """One epoch, over the samples of all ranks. ``epoch`` counts from 1, ``seconds`` are those of
    training alone; ``communication`` is the share of them in which ranks waited for gradients."""

    epoch: int
    step: int
    loss: float
    accuracy: float
    test_loss: float
    test_accuracy: float
    seconds: float
    images_per_second: float
    communication: float
    checkpoint: Path


@dataclass(frozen=True)
class Summary:
    """The whole run. ``seconds`` include evaluation and checkpoints; ``images_per_second`` and
    ``communication`` are None when nothing was left to train; ``best_epoch`` counts from 1."""

    epochs: int
    step: int
    test_loss: float
    test_accuracy: float
    best_test_accuracy: float
    best_epoch: int
    seconds: float
    images_per_second: float | None
    communication: float | None
    checkpoint: Path


@dataclass(frozen=True)
class Stopped:
    """A run that was ended early: why, ``epochs`` that are over, and what it goes on from."""

    reason: str
    epochs: int
    step: int
    seconds: float
    checkpoint: Path


class Listener:
    """Hears of a run; every method may be left out."""

    def run_begins(self, facts: RunFacts) -> None:
        """Before the first step."""

    def world_changed(self, facts: RunFacts) -> None:
        """Workers of an elastic run were lost or joined; it goes on from its last commit."""

    def epoch_begins(self, epoch: int, samples: int, before: int = 0) -> None:
        """Epoch ``epoch`` (from 1) is about to train on ``samples`` samples of all ranks.

        ``before`` more were read before the run was resumed."""

    def advanced(self, standing: Standing) -> None:
        """After each backward pass."""

    def compared(self, report: StragglerReport, is_news: bool) -> None:
        """Where all workers' time went; ``is_news`` when it is worth a line."""

    def epoch_ended(self, result: EpochResult) -> None:
        """After evaluation and checkpoint of an epoch."""

    def run_ended(self, summary: Summary) -> None:
        """When all is done."""

    def run_stopped(self, stopped: Stopped) -> None:
        """Instead, when it ends early and all is saved."""

    def close(self) -> None:
        """The run is over, whether it ended well or not."""


class Everyone(Listener):
    """Tells several listeners."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def run_begins(self, facts: RunFacts) -> None:
        self._tell("run_begins", facts)

    def world_changed(self, facts: RunFacts) -> None:
        self._tell("world_changed", facts)

    def epoch_begins(self, epoch: int, samples: int, before: int = 0) -> None:
        self._tell("epoch_begins", epoch, samples, before)

    def advanced(self, standing: Standing) -> None:
        self._tell("advanced", standing)

    def compared(self, report: StragglerReport, is_news: bool) -> None:
        self._tell("compared", report, is_news)

    def epoch_ended(self, result: EpochResult) -> None:
        self._tell("epoch_ended", result)

    def run_ended(self, summary: Summary) -> None:
        self._tell("run_ended", summary)

    def run_stopped(self, stopped: Stopped) -> None:
        self._tell("run_stopped", stopped)

    def close(self) -> None:
        self._tell("close")

    def _tell(self, what: str, *news: Any) -> None:
        for listener in self._listeners:
            getattr(listener, what)(*news)
