"""What the loop asks of a framework: an interface, and the numbers that pass through it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvdsync.data.arrays import Dataset
from hvdsync.guard.guard import Guard
from hvdsync.sync.compression.memory import ErrorFeedback
from hvdsync.train.config import TrainConfig
from hvdsync.train.feed import Epoch
from hvdsync.train.models import Network
from hvdsync.train.own_pace import Shared

ERROR_FEEDBACK = "error_feedback"


def remembered(compression: Any, optimizer: Any) -> dict[str, Any]:
    """What a compressor remembers on each rank, as a checkpoint's object; none if it does not."""
    keeps = getattr(compression, "keeps_error", False)
    return {ERROR_FEEDBACK: ErrorFeedback(optimizer)} if keeps else {}


@dataclass(frozen=True)
class Tally:
    """Sums over samples: of the loss, of right answers, and how many samples they are."""

    loss: float = 0.0
    right: float = 0.0
    samples: int = 0


class Observer(Protocol):
    """What a worker tells while it trains."""

    def step_begins(self) -> float:
        """Called before the first pass of each optimizer step; gives its learning rate."""

    def pass_ended(self) -> bool:
        """Called after each backward pass, and after the update if it was a step's last.

        Whether the epoch is to stop here; collective after a step's last pass.
        """


@dataclass(frozen=True)
class Job:
    """What every worker is made from; the same on all ranks."""

    config: TrainConfig
    network: Network
    dataset: Dataset


class Worker(ABC):
    """One rank of one framework: model, optimizer and how they are run.

    Made after the framework's ``hvd.init()``; replicas are equal from then on, in an elastic run
    from the first ``sync()`` of :meth:`elastic_state` on, unless the update rule lets them differ.
    ``guard`` judges its gradients and
    compares replicas.
    """

    guard: Guard

    @abstractmethod
    def train_epoch(
        self, epoch: Epoch, observer: Observer, sums: Sequence[float] | None = None
    ) -> Tally:
        """Train on the passes of ``epoch``, until it is to stop; gives this rank's tally.

        ``sums`` are those of :meth:`sums` at the point where the epoch was left; the tally then is
        that of the whole epoch. There may be no pass left.
        """

    @abstractmethod
    def tally(self) -> Tally:
        """This rank's sums over the epoch under way."""

    @abstractmethod
    def sums(self) -> list[float]:
        """The numbers behind :meth:`tally`; those of all ranks may be added up."""

    @abstractmethod
    def evaluate(self, indices: Any) -> Tally:
        """Sums over the test samples at ``indices`` (at least one), without training."""

    @abstractmethod
    def checkpoint(self, directory: Any, **options: Any) -> Any:
        """The framework's ``hvd.Checkpoint`` for ``directory``, with its further options."""

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """The objects that a checkpoint holds, by name."""

    @abstractmethod
    def elastic_state(self, **attributes: Any) -> Any:
        """The framework's elastic state of model and optimizer, with further ``attributes``."""

    @abstractmethod
    def draw_own_noise(self, step: int) -> None:
        """Go on with noise of this rank alone, after an elastic state made replicas equal."""

    @abstractmethod
    def synchronize_replicas(self) -> None:
        """Make replicas equal where the update rule let them differ; collective."""

    @property
    def shared(self) -> Shared | None:
        """What ranks at their own pace tell one another; None where they step together."""
        return None

    @property
    @abstractmethod
    def waited_seconds(self) -> float:
        """Seconds in which training stood still for communication so far."""

    @property
    @abstractmethod
    def device(self) -> str:
        """Where this rank computes, for people: "CPU" or the GPU's name."""
