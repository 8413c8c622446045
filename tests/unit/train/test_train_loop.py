"""The loop around any framework: learning rates, sums over samples, checkpoints and resuming."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdsync.checkpoint.checkpoint import Checkpoint
from hvdsync.checkpoint.codec import Codec
from hvdsync.data.datasets import synthetic
from hvdsync.errors import HvdsyncError
from hvdsync.guard.guard import Guard
from hvdsync.train import runs
from hvdsync.train.agreement import AgreedError, together
from hvdsync.train.config import TrainConfig
from hvdsync.train.feed import Epoch
from hvdsync.train.keeper import own_sums
from hvdsync.train.listener import Listener, Stopped
from hvdsync.train.loop import Loop
from hvdsync.train.models import make_network
from hvdsync.train.worker import ERROR_FEEDBACK, Job, Observer, Tally, Worker

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
        self.guard = Guard()
        self.rates: list[float] = []
        #: Numbers of steps.
        self.synchronized_after: list[int] = []
        self.total = Total()
        self._waited = 0.0
        self._samples = 0
        #: Called after each pass, as a signal may come.
        self.after_pass: Callable[[int], None] = lambda passes: None

    def train_epoch(
        self, epoch: Epoch, observer: Observer, sums: Sequence[float] | None = None
    ) -> Tally:
        self._samples = 0 if sums is None else int(sums[0])
        for i, batch in enumerate(epoch):
            if i % epoch.accumulate == 0:
                self.rates.append(observer.step_begins())
            # Depends on the order, as training does.
            self.total.value = 0.5 * self.total.value + (batch.weights * batch.labels).sum()
            self._samples += epoch.own_samples[i]
            self.after_pass(i + 1)
            if observer.pass_ended():
                break
        self._waited += 1e-6
        return self.tally()

    def tally(self) -> Tally:
        return Tally(loss=2.0 * self._samples, right=0.75 * self._samples, samples=self._samples)

    def sums(self) -> list[float]:
        return [self._samples]

    def evaluate(self, indices: Any) -> Tally:
        return Tally(loss=0.5 * len(indices), right=float(len(indices)), samples=len(indices))

    def checkpoint(self, directory: Any, **options: Any) -> Any:
        return Checkpoint(directory, codec=TotalCodec(), **options)

    def state(self) -> Mapping[str, Any]:
        return {"model": self.total}

    def elastic_state(self, **attributes: Any) -> Any:
        raise NotImplementedError

    def draw_own_noise(self, step: int) -> None:
        pass

    def synchronize_replicas(self) -> None:
        self.synchronized_after.append(len(self.rates))

    @property
    def waited_seconds(self) -> float:
        return self._waited

    @property
    def device(self) -> str:
        return "none"


class Recorder(Listener):
    def __init__(self) -> None:
        self.told: list[Any] = []
        self.reports: list[Any] = []

    def run_begins(self, facts: Any) -> None:
        self.told.append(facts)

    def epoch_begins(self, epoch: int, samples: int, before: int = 0) -> None:
        self.told.append((epoch, samples, before))

    def epoch_ended(self, result: Any) -> None:
        self.told.append(result)

    def run_stopped(self, stopped: Any) -> None:
        self.told.append(stopped)

    def compared(self, report: Any, is_news: bool) -> None:
        self.reports.append(report)

    def close(self) -> None:
        self.told.append("closed")


def run(
    config: TrainConfig, directory: Path, worker: CountingWorker | None = None
) -> tuple[Any, CountingWorker, Recorder]:
    dataset = synthetic(train_size=105, test_size=30)
    job = Job(config, make_network(config.model, dataset.image_shape, dataset.classes), dataset)
    worker, recorder = worker or CountingWorker(), Recorder()
    outcome = Loop(job, worker, directory, recorder).run()
    recorder.close()
    return outcome, worker, recorder


def test_a_run_trains_evaluates_and_saves_each_epoch(tmp_path: Path) -> None:
    summary, worker, recorder = run(CONFIG, tmp_path)
    assert len(worker.rates) == summary.step == 33
    assert (summary.epochs, summary.test_loss, summary.test_accuracy) == (3, 0.5, 1.0)
    assert summary.checkpoint == tmp_path / "step-00000033"
    facts, begun, result, *_, last = recorder.told
    assert (facts.workers, facts.parameters, facts.resumed_from) == (1, 7850, None)
    assert begun == (1, 105, 0)
    assert (result.epoch, result.step, result.loss, result.accuracy) == (1, 11, 2.0, 0.75)
    assert result.images_per_second == pytest.approx(105 / result.seconds)
    assert result.communication == pytest.approx(1e-6 / result.seconds)
    assert last == "closed"
    assert sorted(p.name for p in tmp_path.glob("step-*")) == [
        "step-00000011",
        "step-00000022",
        "step-00000033",
    ]


def test_where_time_goes_is_reported_by_the_steps_of_the_run(tmp_path: Path) -> None:
    _, _, recorder = run(replace(CONFIG, straggler_every=15), tmp_path)
    assert [(r.first_step, r.last_step) for r in recorder.reports] == [(2, 16), (17, 31), (32, 33)]
    assert all((r.seconds["data"] > 0).all() for r in recorder.reports)
    *_, resumed = run(replace(CONFIG, straggler_every=4, epochs=4, resume=True), tmp_path)
    assert [(r.first_step, r.last_step) for r in resumed.reports] == [(35, 38), (39, 42), (43, 44)]
    *_, never = run(replace(CONFIG, straggler_every=0), tmp_path / "other")
    assert never.reports == []


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


def stop_after(passes: int, epoch: int = 1) -> CountingWorker:
    """A worker in whose ``epoch``-th epoch SIGUSR1 comes during the given pass."""
    worker = CountingWorker()
    epochs = [0]

    def after_pass(done: int) -> None:
        epochs[0] += done == 1
        if epochs[0] == epoch and done == passes:
            os.kill(os.getpid(), signal.SIGUSR1)

    worker.after_pass = after_pass
    return worker


ACCUMULATED = replace(CONFIG, accumulate=4, augment=True, scale_lr="linear", warmup_epochs=1.5)


@pytest.mark.parametrize("config", [CONFIG, ACCUMULATED])
@pytest.mark.parametrize("passes", [1, 3, 4, 10, 11])
def test_a_signal_saves_after_the_step_and_the_rest_ends_as_an_uninterrupted_run(
    tmp_path: Path, config: TrainConfig, passes: int
) -> None:
    whole, there, told = run(config, tmp_path / "whole")
    stopped, first, before = run(config, tmp_path / "parts", stop_after(passes, epoch=2))
    accumulate = config.accumulate
    steps_of_epoch = -(-11 // accumulate)
    assert stopped == before.told[-2]
    assert isinstance(stopped, Stopped)
    assert (stopped.reason, stopped.epochs) == ("SIGUSR1 on rank 0", 1)
    assert stopped.step == steps_of_epoch - (-passes // accumulate)
    assert stopped.checkpoint == tmp_path / "parts" / f"step-{stopped.step:08d}"
    assert stopped.checkpoint.is_dir()

    config = replace(config, resume=True)
    ended, rest, after = run(config, tmp_path / "parts")
    assert [*first.rates, *rest.rates] == there.rates
    assert rest.total.value == there.total.value
    assert (ended.step, ended.epochs, ended.test_loss) == (whole.step, 3, whole.test_loss)
    # The epoch that was left has the loss and the accuracy of all of its samples.
    read = 10 * accumulate * (stopped.step - steps_of_epoch)
    assert after.told[1] == (2, 105 - min(read, 105), min(read, 105))
    for mine, theirs in zip(after.told[2::2], told.told[4::2], strict=False):
        assert (mine.epoch, mine.loss, mine.accuracy) == (theirs.epoch, 2.0, 0.75)


def test_a_signal_between_epochs_adds_no_checkpoint(tmp_path: Path) -> None:
    class Signalled(CountingWorker):
        def evaluate(self, indices: Any) -> Tally:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().evaluate(indices)

    stopped, _, _ = run(CONFIG, tmp_path, Signalled())
    assert (stopped.epochs, stopped.step) == (1, 11)
    assert [p.name for p in tmp_path.glob("step-*")] == ["step-00000011"]


def test_the_handlers_are_gone_after_the_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run(CONFIG, tmp_path, stop_after(2))
    assert signal.getsignal(signal.SIGTERM) is before


def test_checkpoints_come_every_so_many_steps_and_after_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = []
    save = Checkpoint.save

    def remembered(self: Checkpoint, step: int, **state: Any) -> Any:
        saved.append(step)
        return save(self, step, **state)

    monkeypatch.setattr(Checkpoint, "save", remembered)
    run(replace(CONFIG, checkpoint_every=4, epochs=2), tmp_path)
    assert saved == [4, 8, 11, 12, 16, 20, 22]
    assert (tmp_path / "step-00000022").is_dir()


def test_the_checkpoint_of_the_best_epoch_stays_beside_the_newest(tmp_path: Path) -> None:
    class Varying(CountingWorker):
        accuracies = iter([0.9, 0.5, 0.5, 0.5, 0.5])

        def evaluate(self, indices: Any) -> Tally:
            return Tally(0.0, next(self.accuracies) * len(indices), len(indices))

    run(replace(CONFIG, checkpoint_every=4, epochs=5), tmp_path, Varying())
    kept = sorted(p.name for p in tmp_path.glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (11, 48, 52, 55)]


def test_a_time_limit_saves_and_ends(tmp_path: Path) -> None:
    config = replace(CONFIG, max_time=1e-6)
    steps = []
    while not steps or steps[-1].step < 33:
        outcome, _, _ = run(replace(config, resume=True), tmp_path)
        assert (
            isinstance(outcome, Stopped) and outcome.reason == "the time limit of 6e-05 s on rank 0"
        )
        steps.append(outcome)
        assert len(steps) <= 40
    # Each start takes one step, and one more start evaluates after the last of an epoch.
    expected = [*range(1, 12), *range(11, 23), *range(22, 34)]
    assert [stopped.step for stopped in steps] == expected
    ended, worker, _ = run(replace(CONFIG, resume=True), tmp_path)
    _, there, _ = run(CONFIG, tmp_path / "whole")
    assert worker.rates == [] and worker.total.value == there.total.value
    assert (ended.step, ended.epochs) == (33, 3)


def test_the_best_epoch_is_kept_in_mind_over_a_resume(tmp_path: Path) -> None:
    class Varying(CountingWorker):
        accuracies = iter([0.5, 0.9, 0.7])

        def evaluate(self, indices: Any) -> Tally:
            count = len(indices)
            return Tally(0.0, next(self.accuracies) * count, count)

    run(replace(CONFIG, epochs=2), tmp_path, Varying())
    summary, _, _ = run(replace(CONFIG, resume=True), tmp_path, Varying())
    assert summary.test_accuracy == pytest.approx(0.7)
    assert (summary.best_test_accuracy, summary.best_epoch) == (pytest.approx(0.9), 2)


@pytest.mark.parametrize(
    ("saved", "now", "rank", "mine"),
    [
        ([[1.0, 2], [3.0, 4]], 2, 1, [3.0, 4]),
        ([[1.0, 2], [3.0, 4]], 3, 0, [4.0, 6]),
        ([[1.0, 2], [3.0, 4]], 3, 2, [0.0, 0.0]),
        ([[1.0, 2], [3.0, 4]], 1, 0, [4.0, 6]),
        (None, 2, 0, None),
    ],
)
def test_sums_keep_their_total_at_another_number_of_ranks(
    pretend: Callable[..., None], saved: Any, now: int, rank: int, mine: Any
) -> None:
    pretend(rank, now)
    assert own_sums(saved) == mine


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


def test_listeners_are_closed_when_training_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(CountingWorker):
        def evaluate(self, indices: Any) -> Tally:
            raise RuntimeError("out of luck")

    recorder = Recorder()
    dataset = synthetic(train_size=20, test_size=10)
    job = Job(CONFIG, make_network("linear", dataset.image_shape, dataset.classes), dataset)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "make_listener", lambda config: recorder)
    with pytest.raises(RuntimeError, match="out of luck"):
        runs.run(SimpleNamespace(worker=lambda job: Failing()), job)
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


def test_ranks_that_train_alone_end_where_they_meet(tmp_path: Path) -> None:
    config = replace(CONFIG, update="local-sgd", period=4, update_warmup=1)
    stopped, _, _ = run(config, tmp_path, stop_after(3))
    assert stopped.step == 5  # 1 of the warm-up, and a period


def test_ranks_that_train_alone_compare_their_times_where_they_meet(tmp_path: Path) -> None:
    config = replace(CONFIG, update="local-sgd", period=4, straggler_every=5, epochs=1)
    _, _, recorder = run(config, tmp_path)
    # The first step starts the clock, and 7 is none at which they meet.
    assert [(r.first_step, r.last_step) for r in recorder.reports] == [(2, 8), (9, 11)]


class Remembering(CountingWorker):
    """Keeps what a compressor did not send."""

    def __init__(self) -> None:
        super().__init__()
        self.own = OwnState()

    def state(self) -> Mapping[str, Any]:
        return {**super().state(), ERROR_FEEDBACK: self.own}


class OwnState:
    per_rank = True

    def __init__(self) -> None:
        self.value = np.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.parametrize(("compression", "found"), [("onebit", 7.0), ("topk:0.1", 0.0)])
def test_what_a_compressor_did_not_send_is_taken_up_by_the_same_one(
    compression: str, found: float, tmp_path: Path
) -> None:
    config = replace(CONFIG, compression="onebit")
    first, second = Remembering(), Remembering()
    first.own.value += 7
    run(config, tmp_path, first)
    run(replace(config, compression=compression, epochs=4, resume=True), tmp_path, second)
    assert second.own.value.tolist() == [found] * 3


def test_replicas_are_made_equal_before_each_evaluation(tmp_path: Path) -> None:
    class Evaluating(CountingWorker):
        def evaluate(self, indices: Any) -> Tally:
            assert self.synchronized_after[-1] == len(self.rates)
            return super().evaluate(indices)

    _, worker, _ = run(replace(CONFIG, update="diloco"), tmp_path, Evaluating())
    assert worker.synchronized_after == [11, 22, 33]
