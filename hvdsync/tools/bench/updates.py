"""Update rules raced against one another while one rank is slow: settings in, numbers out.

Rules train in turn, round after round, from the same weights; PyTorch on CPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from hvdsync.tools.bench import environment
from hvdsync.tools.bench.report import Chart, Report, Table

_WARM_UP_STEPS = 20
# Ranks that step together ask one another seldom whether the time is over.
_STEPS_BETWEEN_QUESTIONS = 16


@dataclass(frozen=True)
class Settings:
    """What is measured; see ``python -m hvdsync bench updates --help``."""

    seconds: float = 10.0
    samples: int = 60_000
    slow: float = 4.0
    rounds: int = 3
    period: int = 16
    staleness: int = 8
    batch_size: int = 64
    lr: float = 0.05
    dataset: str = "mnist"


@dataclass(frozen=True)
class Run:
    """One training of one rule. ``steps`` are each rank's; ``accuracy`` that of the test set."""

    steps: list[int]
    seconds: float
    accuracy: float

    @property
    def steps_per_minute(self) -> float:
        """Steps of all ranks together."""
        return 60 * sum(self.steps) / self.seconds


@dataclass(frozen=True)
class Measured:
    """All runs by name of the rule; ``step_seconds`` is one step of one rank that waits for nobody.

    ``of_equal_time`` trained for as long, ``of_equal_samples`` on as many samples, each rank on its
    share.
    """

    settings: Settings
    ranks: int
    step_seconds: float
    of_equal_time: dict[str, list[Run]]
    of_equal_samples: dict[str, list[Run]]

    def report(self) -> Report:
        """Medians over rounds, and ratios to the first rule."""
        settings = self.settings
        slow = settings.slow * self.step_seconds
        about = (
            f"{self.ranks} workers, {settings.dataset}, batches of {settings.batch_size}; a step "
            f"takes {1000 * self.step_seconds:.3g} ms, worker 0 sleeps {1000 * slow:.3g} ms in "
            f"each of its own. Medians of {settings.rounds} round(s), in which rules took turns."
        )
        columns = (
            "update rule",
            "steps per minute",
            "ratio",
            "of worker 0",
            f"accuracy after {settings.seconds:g} s",
            f"accuracy after {settings.samples:,} samples",
            "seconds for them",
        )
        rates = {
            name: _median(runs, lambda run: run.steps_per_minute)
            for name, runs in self.of_equal_time.items()
        }
        base = next(iter(rates.values()))
        rows = []
        accuracies: dict[str, list[float]] = {"at equal time": [], "at equal samples": []}
        for name, timed in self.of_equal_time.items():
            counted = self.of_equal_samples[name]
            at_time = _median(timed, lambda run: run.accuracy)
            at_samples = _median(counted, lambda run: run.accuracy)
            accuracies["at equal time"].append(100 * at_time)
            accuracies["at equal samples"].append(100 * at_samples)
            rows.append(
                (
                    name,
                    f"{rates[name]:,.0f}",
                    f"{rates[name] / base:.2f}",
                    f"{_median(timed, lambda run: run.steps[0] / sum(run.steps)):.0%}",
                    f"{at_time:.2%}",
                    f"{at_samples:.2%}",
                    f"{_median(counted, lambda run: run.seconds):.1f}",
                )
            )
        rules = list(rates)
        return Report(
            "updates",
            [about],
            environment.describe(dataset=settings.dataset),
            [Table("Update rules with one slow worker", columns, rows)],
            [
                Chart("Steps per minute", "bars", rules, {"all workers": list(rates.values())}),
                Chart("Accuracy, %", "bars", rules, accuracies),
            ],
            asdict(self),
        )


def _median(runs: Sequence[Run], value: Callable[[Run], float]) -> float:
    return median(map(value, runs))


def measure(settings: Settings) -> Measured:
    """Race the rules on the ranks that were started; collective.

    Raises ``LaunchError`` where they were not started over MPI.
    """
    import torch

    import hvdsync.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    rules = {
        "synchronous": hvd.Synchronous(),
        f"local SGD, period {settings.period}": hvd.LocalSGD(settings.period),
        "asynchronous": hvd.Asynchronous(),
        f"asynchronous, staleness {settings.staleness}": hvd.Asynchronous(settings.staleness),
    }
    race = _Race(settings)
    step_seconds = race.time_a_step()
    sleep = settings.slow * step_seconds if hvd.rank() == 0 else 0.0
    share = -(-settings.samples // (settings.batch_size * hvd.size()))
    of_equal_time: dict[str, list[Run]] = {name: [] for name in rules}
    of_equal_samples: dict[str, list[Run]] = {name: [] for name in rules}
    for _ in range(settings.rounds):
        for name, rule in rules.items():
            of_equal_time[name].append(race.run(rule, sleep, seconds=settings.seconds))
            of_equal_samples[name].append(race.run(rule, sleep, steps=share))
    hvd.shutdown()
    return Measured(settings, race.ranks, step_seconds, of_equal_time, of_equal_samples)


class _Race:
    def __init__(self, settings: Settings) -> None:
        import hvdsync.torch as hvd
        from hvdsync.data.datasets import load
        from hvdsync.train.models import make_network

        self._settings = settings
        self._dataset = load(settings.dataset, progress=hvd.rank() == 0, seed=0)
        self._network = make_network("mlp", self._dataset.image_shape, self._dataset.classes)
        self.ranks = hvd.size()

    def _model(self) -> Any:
        from hvdsync.train.torch_worker import TorchNetwork

        return TorchNetwork(self._network, self._network.initial_weights(0))

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        import torch

        import hvdsync.torch as hvd

        sampler = hvd.DistributedSampler(len(self._dataset.x_train), uneven="drop")
        while True:
            for indices in sampler.epoch_batches(self._settings.batch_size, drop_last=True):
                images, labels = self._dataset.train_batch(indices)
                yield torch.from_numpy(images), torch.from_numpy(labels)

    def _stepper(self, model: Any, optimizer: Any, sleep: float) -> Callable[[], None]:
        from torch.nn import functional

        batches = self._batches()

        def step() -> None:
            images, labels = next(batches)
            optimizer.zero_grad()
            functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            if sleep:
                time.sleep(sleep)

        return step

    def time_a_step(self) -> float:
        """Seconds of one step of the plain optimizer on the slowest rank, the median of some."""
        import torch

        from hvdsync.comm import verbs

        model = self._model()
        step = self._stepper(model, torch.optim.SGD(model.parameters(), self._settings.lr), 0.0)
        times = []
        for _ in range(2 * _WARM_UP_STEPS):
            started = time.perf_counter()
            step()
            times.append(time.perf_counter() - started)
        return max(verbs.allgather_object(float(np.median(times[_WARM_UP_STEPS:]))))

    def run(
        self, rule: Any, sleep: float, *, seconds: float | None = None, steps: int | None = None
    ) -> Run:
        """Train for so long, or so many steps of each rank, and evaluate; collective."""
        import torch

        import hvdsync.torch as hvd
        from hvdsync.comm import world

        own_pace = isinstance(rule, hvd.Asynchronous)
        # Updates that are averaged come as far as those that are added up.
        rate = self._settings.lr * (1 if own_pace else hvd.size())
        model = self._model()
        model, optimizer = hvd.distribute(
            model, torch.optim.SGD(model.parameters(), rate), update=rule
        )
        step = self._stepper(model, optimizer, sleep)
        # What is made in the first step, memory that all share for instance, is not measured.
        step()
        optimizer.synchronize_replicas()
        world.current().barrier()
        started, done = time.perf_counter(), 0

        def is_over() -> bool:
            if steps is not None:
                return done == steps
            over = time.perf_counter() - started >= (seconds or 0.0)
            if own_pace:
                return over
            return done % _STEPS_BETWEEN_QUESTIONS == 0 and hvd.agree_any(over)

        while True:
            step()
            done += 1
            if is_over():
                break
        optimizer.synchronize_replicas()
        world.current().barrier()
        taken = time.perf_counter() - started
        return Run(hvd.allgather_object(done), taken, self._evaluate(model))

    def _evaluate(self, model: Any) -> float:
        import torch

        import hvdsync.torch as hvd
        from hvdsync.train.feed import evaluation_batches, evaluation_share

        right = count = 0
        with torch.no_grad():
            for images, labels in evaluation_batches(
                self._dataset, evaluation_share(self._dataset)
            ):
                guesses = model(torch.from_numpy(images)).argmax(1).numpy()
                right += int((guesses == labels).sum())
                count += len(labels)
        accuracy = hvd.average_metrics({"accuracy": right / max(count, 1)}, weight=count)
        return accuracy["accuracy"]
