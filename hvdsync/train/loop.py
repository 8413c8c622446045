"""The training loop of all frameworks: a worker in, a trained model, checkpoints and numbers out.

Epochs, learning rate, evaluation, checkpoints and resuming; what a step is, the worker knows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdsync.comm import verbs
from hvdsync.data.sampler import DistributedSampler
from hvdsync.errors import CheckpointError
from hvdsync.sync.schedule import scale_learning_rate, warmup
from hvdsync.train.agreement import together
from hvdsync.train.config import TrainConfig
from hvdsync.train.feed import Epoch, evaluation_share
from hvdsync.train.listener import EpochResult, Listener, RunFacts, Standing, Summary
from hvdsync.train.worker import Job, Observer, Tally, Worker

# Going on with another of these would mean other weights, other samples or a useless state.
_IDENTITY = ("framework", "model", "dataset", "optimizer", "seed")


class Loop:
    """One run on one rank. Every method is collective."""

    def __init__(self, job: Job, worker: Worker, directory: Path, listener: Listener) -> None:
        self._job = job
        self._config = job.config
        self._worker = worker
        self._directory = directory
        self._listener = listener
        self._checkpoint = worker.checkpoint(directory)
        self._sampler = DistributedSampler(
            len(job.dataset.x_train), seed=job.config.seed, uneven="exact"
        )
        self._step = 0
        self._epochs_done = 0
        self._resumed_from: int | None = None

    def run(self) -> Summary:
        """Train what is left of the epochs, evaluate, save; gives the whole run's numbers."""
        started = time.perf_counter()
        if self._config.resume:
            self._restore()
        self._listener.run_begins(self._facts())
        results = []
        try:
            while self._epochs_done < self._config.epochs:
                results.append(self._run_epoch())
                self._listener.epoch_ended(results[-1])
            summary = self._summarize(results, time.perf_counter() - started)
            self._listener.run_ended(summary)
        finally:
            self._listener.close()
            self._checkpoint.close()
        return summary

    def _run_epoch(self) -> EpochResult:
        epoch = Epoch(
            self._job.dataset, self._sampler, self._config.batch_size, self._config.accumulate
        )
        waited = self._worker.waited_seconds
        self._listener.epoch_begins(self._epochs_done + 1, sum(epoch.samples))
        started = time.perf_counter()
        observer = _EpochObserver(self._config, epoch, self._step, self._worker, self._listener)
        trained = self._worker.train_epoch(epoch, observer)
        seconds = time.perf_counter() - started
        waited = self._worker.waited_seconds - waited
        self._step += epoch.steps
        self._epochs_done += 1

        train = _over_ranks(trained)
        test = self._evaluate()
        # Ranks end an epoch at nearly, not exactly, the same time.
        times = verbs.average_metrics({"seconds": seconds, "waited": waited})
        return EpochResult(
            epoch=self._epochs_done,
            step=self._step,
            loss=train["loss"],
            accuracy=train["accuracy"],
            test_loss=test["loss"],
            test_accuracy=test["accuracy"],
            seconds=times["seconds"],
            images_per_second=sum(epoch.samples) / times["seconds"],
            communication=times["waited"] / times["seconds"],
            checkpoint=self._save(),
        )

    def _evaluate(self) -> Mapping[str, float]:
        indices = evaluation_share(self._job.dataset)
        return _over_ranks(self._worker.evaluate(indices) if len(indices) else Tally())

    def _save(self) -> Path:
        def save() -> Path:
            folder: Path = self._checkpoint.save(
                self._step,
                **self._worker.state(),
                epoch=self._epochs_done,
                data=self._sampler.state_dict(),
                config=_plain(self._config),
            )
            return folder

        return together(save)

    def _restore(self) -> None:
        def restore() -> None:
            # The plain values first: a checkpoint of another optimizer is best called that.
            values = self._checkpoint.restore()
            if values is None:
                return
            self._refuse_another_run(values["config"])
            values = self._checkpoint.restore(**self._worker.state())
            self._step = self._resumed_from = values["step"]
            self._epochs_done = values["epoch"]
            self._sampler.load_state_dict(values["data"])

        together(restore)

    def _refuse_another_run(self, saved: Mapping[str, Any]) -> None:
        mine = _plain(self._config)
        for name in _IDENTITY:
            if saved.get(name) != mine[name]:
                raise CheckpointError(
                    f"--resume: the checkpoint in {self._directory} is of a run with "
                    f"--{name} {saved.get(name)}, not {mine[name]}; give the same, or another "
                    "--checkpoint-dir"
                )

    def _facts(self) -> RunFacts:
        return RunFacts(
            config=self._config,
            workers=verbs.size(),
            device=self._worker.device,
            parameters=sum(w.size for w in self._job.network.initial_weights(0)),
            train_samples=len(self._job.dataset.x_train),
            test_samples=len(self._job.dataset.x_test),
            first_epoch=self._epochs_done,
            resumed_from=self._resumed_from,
            directory=self._directory,
        )

    def _summarize(self, results: list[EpochResult], seconds: float) -> Summary:
        trained = sum(r.seconds for r in results)
        if results:
            last = results[-1]
            test, checkpoint = {"loss": last.test_loss, "accuracy": last.test_accuracy}, None
            checkpoint = last.checkpoint
        else:
            test, checkpoint = dict(self._evaluate()), self._directory
        return Summary(
            epochs=self._epochs_done,
            step=self._step,
            test_loss=test["loss"],
            test_accuracy=test["accuracy"],
            seconds=seconds,
            images_per_second=(
                sum(r.images_per_second * r.seconds for r in results) / trained if results else None
            ),
            communication=(
                sum(r.communication * r.seconds for r in results) / trained if results else None
            ),
            checkpoint=checkpoint,
        )


class _EpochObserver(Observer):
    """Hands out learning rates and passes on how far an epoch is."""

    def __init__(
        self, config: TrainConfig, epoch: Epoch, step: int, worker: Worker, listener: Listener
    ) -> None:
        self._epoch = epoch
        self._step = step
        self._worker = worker
        self._listener = listener
        self._passes = 0
        self._samples = 0
        self._started = time.perf_counter()
        self._rate = 0.0
        rule = None if config.scale_lr == "none" else config.scale_lr
        self._full_rate = scale_learning_rate(config.lr, rule)
        # From the rate of one worker; a rate that does not grow needs no warming up.
        steps = round(config.warmup_epochs * epoch.steps)
        self._factor = warmup(steps, start=config.lr / self._full_rate)

    def step_begins(self) -> float:
        self._rate = self._full_rate * self._factor(self._step)
        return self._rate

    def pass_ended(self) -> None:
        self._samples += self._epoch.samples[self._passes]
        self._passes += 1
        if self._passes % self._epoch.accumulate == 0:
            self._step += 1
        self._listener.advanced(
            Standing(
                step=self._step,
                samples=self._samples,
                seconds=time.perf_counter() - self._started,
                learning_rate=self._rate,
                tally=self._worker.tally,
            )
        )


def _over_ranks(tally: Tally) -> Mapping[str, float]:
    """Loss and accuracy over the samples of all ranks."""
    count = max(tally.samples, 1)
    means = {"loss": tally.loss / count, "accuracy": tally.right / count}
    return verbs.average_metrics(means, weight=tally.samples)


def _plain(config: TrainConfig) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(config).items()}
