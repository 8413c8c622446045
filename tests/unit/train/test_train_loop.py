"""The loop around any framework: learning rates, sums over samples, checkpoints and resuming."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdsync.checkpoint.checkpoint import Checkpoint
from hvdsync.checkpoint.codec import Codec
from hvdsync.data.datasets import synthetic
from hvdsync.errors import HvdsyncError
from hvdsync.train.agreement import AgreedError, together
from hvdsync.train.config import TrainConfig
from hvdsync.train.feed import Epoch
from hvdsync.train.listener import Listener, Summary
from hvdsync.train.loop import Loop
from hvdsync.train.models import make_network
from hvdsync.train.worker import Job, Observer, Tally, Worker

CONFIG = TrainConfig(dataset="synthetic", model="linear", epochs=3, batch_size=10, optimizer="sgd")


class Total:
    """Stands for a model: the weighted sum of all labels that it was trained on, in order."""

    def __init__(self) -> None:
        self.value = np.zeros(1)


class TotalCodec(Codec):
    def handles(self, obj: Any) -> bool:
        return isinstance(obj, Total)

    def snapshot(self, name: str, obj: Any) -> Any:
        return obj.value.tolist()

    def write(self, folder: Path, name: str, snapshot: Any) -> None:
        (folder / f"{name}.json").write_text(json.dumps(snapshot))

    def read(self, folder: Path, name: str, obj: Any) -> Any:
        return np.array(json.loads((folder / f"{name}.json").read_text()))

    def apply(self, obj: Any, tree: Any) -> None:
        obj.value = tree


class CountingWorker(Worker):
    """Trains nothing; remembers what the loop told it."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.total = Total()
        self._waited = 0.0

    def train_epoch(self, epoch: Epoch, observer: Observer) -> Tally:
        samples = 0
        for i, batch in enumerate(epoch):
            if i % epoch.accumulate == 0:
                self.rates.append(observer.step_begins())
            # Depends on the order, as training does.
            self.total.value = 0.5 * self.total.value + (batch.weights * batch.labels).sum()
            samples += epoch.own_samples[i]
            observer.pass_ended()
        self._waited += 1e-6
        return Tally(loss=2.0 * samples, right=0.75 * samples, samples=samples)

    def tally(self) -> Tally:
        return Tally()

    def evaluate(self, indices: Any) -> Tally:
        return Tally(loss=0.5 * len(indices), right=float(len(indices)), samples=len(indices))

    def checkpoint(self, directory: Any) -> Any:
        return Checkpoint(directory, codec=TotalCodec())

    def state(self) -> Mapping[str, Any]:
        return {"model": self.total}

    @property
    def waited_seconds(self) -> float:
        return self._waited

    @property
    def device(self) -> str:
        return "none"


class Recorder(Listener):
    def __init__(self) -> None:
        self.told: list[Any] = []

    def run_begins(self, facts: Any) -> None:
        self.told.append(facts)

    def epoch_begins(self, epoch: int, samples: int) -> None:
        self.told.append((epoch, samples))

    def epoch_ended(self, result: Any) -> None:
        self.told.append(result)

    def close(self) -> None:
        self.told.append("closed")


def run(
    config: TrainConfig, directory: Path, worker: CountingWorker | None = None
) -> tuple[Summary, CountingWorker, Recorder]:
    dataset = synthetic(train_size=105, test_size=30)
    job = Job(config, make_network(config.model, dataset.image_shape, dataset.classes), dataset)
    worker, recorder = worker or CountingWorker(), Recorder()
    return Loop(job, worker, directory, recorder).run(), worker, recorder


def test_a_run_trains_evaluates_and_saves_each_epoch(tmp_path: Path) -> None:
    summary, worker, recorder = run(CONFIG, tmp_path)
    assert len(worker.rates) == summary.step == 33
    assert (summary.epochs, summary.test_loss, summary.test_accuracy) == (3, 0.5, 1.0)
    assert summary.checkpoint == tmp_path / "step-00000033"
    facts, begun, result, *_, last = recorder.told
    assert (facts.workers, facts.parameters, facts.resumed_from) == (1, 7850, None)
    assert begun == (1, 105)
    assert (result.epoch, result.step, result.loss, result.accuracy) == (1, 11, 2.0, 0.75)
    assert result.images_per_second == pytest.approx(105 / result.seconds)
    assert result.communication == pytest.approx(1e-6 / result.seconds)
    assert last == "closed"
    assert sorted(p.name for p in tmp_path.glob("step-*")) == [
        "step-00000011",
        "step-00000022",
        "step-00000033",
    ]


def test_accumulation_counts_steps_not_passes(tmp_path: Path) -> None:
    summary, worker, _ = run(replace(CONFIG, accumulate=4, epochs=1), tmp_path)
    assert summary.step == len(worker.rates) == 3  # 11 passes, filled up to 12


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0), ("none", 1.0)])
def test_the_rate_grows_from_that_of_one_worker_during_warm_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: Any, factor: float
) -> None:
    # The schedule asks for the number of workers; everything else stays one process.
    from hvdsync.sync import schedule

    monkeypatch.setattr(schedule.verbs, "size", lambda: 4)
    monkeypatch.setattr("hvdsync.train.feed.verbs", _Alone)
    config = replace(CONFIG, lr=0.1, scale_lr=rule, warmup_epochs=2)
    _, worker, _ = run(config, tmp_path)
    rates = np.array(worker.rates)
    assert rates[0] == pytest.approx(0.1)
    assert rates[22:] == pytest.approx(np.full(11, 0.1 * factor))
    assert rates[:22] == pytest.approx(0.1 + 0.1 * (factor - 1) * np.arange(22) / 22)


class _Alone:
    @staticmethod
    def size() -> int:
        return 1

    @staticmethod
    def rank() -> int:
        return 0


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole, there, _ = run(CONFIG, tmp_path / "whole")
    run(replace(CONFIG, epochs=1), tmp_path / "parts")
    resumed, here, recorder = run(replace(CONFIG, resume=True), tmp_path / "parts")
    assert recorder.told[0].first_epoch == 1 and recorder.told[0].resumed_from == 11
    assert here.rates == there.rates[11:]
    assert here.total.value == there.total.value
    assert (resumed.step, resumed.epochs) == (whole.step, whole.epochs)


def test_resuming_a_finished_run_evaluates_it(tmp_path: Path) -> None:
    run(CONFIG, tmp_path)
    summary, worker, _ = run(replace(CONFIG, resume=True), tmp_path)
    assert worker.rates == []
    assert summary.test_accuracy == 1.0
    assert summary.images_per_second is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": "adam"}, "--optimizer sgd, not adam"),
        ({"model": "mlp"}, "--model linear, not mlp"),
        ({"seed": 9}, "--seed 0, not 9"),
    ],
)
def test_resuming_another_run_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    run(replace(CONFIG, epochs=1), tmp_path)
    with pytest.raises(HvdsyncError, match=said):
        run(replace(CONFIG, resume=True, **change), tmp_path)


def test_listeners_are_closed_when_training_fails(tmp_path: Path) -> None:
    class Failing(CountingWorker):
        def evaluate(self, indices: Any) -> Tally:
            raise RuntimeError("out of luck")

    recorder = Recorder()
    dataset = synthetic(train_size=20, test_size=10)
    job = Job(CONFIG, make_network("linear", dataset.image_shape, dataset.classes), dataset)
    with pytest.raises(RuntimeError, match="out of luck"):
        Loop(job, Failing(), tmp_path, recorder).run()
    assert recorder.told[-1] == "closed"


def test_together_passes_results_on_and_makes_failures_everyones() -> None:
    assert together(lambda: 5) == 5

    def fail() -> None:
        raise HvdsyncError("the reason")

    with pytest.raises(AgreedError, match="^the reason$"):
        together(fail)


def test_the_failure_of_another_rank_is_raised_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from hvdsync.comm import verbs

    monkeypatch.setattr(verbs, "allgather_object", lambda mine, name: [mine, "disk full", "other"])
    with pytest.raises(AgreedError, match="^disk full$"):
        together(lambda: 5)
