"""The training loop of all frameworks: a worker in, a trained model, checkpoints and numbers out.

Epochs, evaluation, resuming and early ends; what a step is, the worker knows.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdsync.checkpoint.preemption import Preemption
from hvdsync.comm import verbs
from hvdsync.data.sampler import DistributedSampler
from hvdsync.guard.stragglers import Stragglers
from hvdsync.sync.update_rules import LocalRule
from hvdsync.train.feed import Epoch, evaluation_share
from hvdsync.train.keeper import Keeper, Position, own_sums
from hvdsync.train.limits import TimeLimit
from hvdsync.train.listener import EpochResult, Listener, RunFacts, Stopped, Summary
from hvdsync.train.observer import EpochObserver
from hvdsync.train.own_pace import OwnPace
from hvdsync.train.worker import Job, Tally, Worker


@dataclass(frozen=True)
class Standpoint:
    """Where a run stands, as a new loop takes it up: all ranks' sums, and the sampler's state."""

    position: Position
    sums: Sequence[Sequence[float]] | None
    data: Mapping[str, Any]


class Loop:
    """One run on one rank, or the part of it in one world of an elastic run.

    ``commit`` is called where an elastic run may be taken up: at the beginning, after each so many
    steps and after each epoch. ``start`` is where one is. Every method is collective.
    """

    def __init__(
        self,
        job: Job,
        worker: Worker,
        directory: Path,
        listener: Listener,
        *,
        commit: Callable[[Standpoint], None] | None = None,
        start: Standpoint | None = None,
    ) -> None:
        self._job = job
        self._config = job.config
        self._worker = worker
        self._directory = directory
        self._listener = listener
        self._keeper = Keeper(job.config, worker, directory)
        self._sampler = DistributedSampler(
            len(job.dataset.x_train), seed=job.config.seed, uneven="exact"
        )
        self._position = Position()
        self._resumed_from: int | None = None
        self._commit = commit
        self._start = start
        self._own_pace = OwnPace(self._wishes_to_stop)
        # Ranks at their own pace are brought together only where there is something to ask.
        alone = job.config.update == "async"
        # Elastic launchers end single workers with SIGTERM, which must not end the others.
        self._preemption = (
            Preemption((signal.SIGUSR1,)) if commit else Preemption(every=1 if alone else None)
        )
        self._limit = TimeLimit(job.config.max_time)
        # Nobody waits for who is slow then, and to compare would be to wait.
        every = 0 if alone else job.config.straggler_every
        self._stragglers = Stragglers(every, tell=listener.compared) if every else None
        self._saved = directory

    def run(self) -> Summary | Stopped:
        """Train what is left of the epochs, evaluate, save; gives the whole run's numbers.

        After a signal on any rank, or when ``--max-time`` is nearly over, it saves after the step
        at hand and gives :class:`Stopped`.
        """
        try:
            with self._preemption:
                return self._run()
        except BaseException:
            self._keeper.abandon()
            raise

    def _run(self) -> Summary | Stopped:
        started = time.perf_counter()
        if self._start is not None:
            self._take_up(self._start)
            self._listener.world_changed(self._facts())
        else:
            if self._config.resumes:
                self._restore()
            self._listener.run_begins(self._facts())
            self._commit_at(self._sampler.state_dict())
        results: list[EpochResult] = []
        while self._position.epochs < self._config.epochs:
            result = None if results and self._is_to_stop() else self._run_epoch()
            if result is None:
                return self._stop(time.perf_counter() - started)
            results.append(result)
            self._listener.epoch_ended(result)
        if self._stragglers:
            self._stragglers.report()
        self._keeper.close()
        summary = self._summarize(results, time.perf_counter() - started)
        self._listener.run_ended(summary)
        return summary

    def _run_epoch(self) -> EpochResult | None:
        """Train, evaluate and save an epoch or what is left of one; None if it was stopped."""
        position = self._position
        epoch = Epoch(
            self._job.dataset,
            self._sampler,
            self._config.batch_size,
            self._config.accumulate,
            augment=self._config.augment,
            trained=position.trained,
            watch=self._stragglers.watch if self._stragglers else iter,
        )
        first = position.step
        stopped = False

        def step_ended(passes: int) -> bool:
            nonlocal stopped
            position.step = first + passes // epoch.accumulate
            every = self._config.checkpoint_every
            ends = passes == epoch.passes
            due = every is not None and position.step % every == 0 and not ends
            meets = self._meets_after(position.step, anyway=due or ends)
            stopped = meets and self._is_to_stop()
            if stopped or due:
                position.sums = self._worker.sums()
                self._saved = self._keeper.save(position, epoch.state_after(passes))
            if self._commit and not stopped and position.step % self._config.commit_every == 0:
                position.sums = self._worker.sums()
                self._commit_at(epoch.state_after(passes))
            if self._stragglers:
                self._stragglers.step(position.step, meets=meets)
            return stopped

        waited = self._worker.waited_seconds
        self._listener.epoch_begins(position.epochs + 1, sum(epoch.samples), epoch.samples_before)
        if self._stragglers:
            # Evaluation and the checkpoint of the epoch before are no part of a step.
            self._stragglers.skip()
        started = time.perf_counter()
        observer = EpochObserver(
            self._config,
            epoch,
            position.epochs,
            position.step,
            self._worker,
            self._listener,
            step_ended,
        )
        trained = self._worker.train_epoch(epoch, observer, position.sums)
        seconds = time.perf_counter() - started
        waited = self._worker.waited_seconds - waited
        if stopped:
            return None
        position.step = first + epoch.steps

        train = _over_ranks(trained)
        self._worker.synchronize_replicas()
        test = self._evaluate()
        position.evaluated(test["accuracy"])
        # Ranks end an epoch at nearly, not exactly, the same time.
        times = verbs.average_metrics({"seconds": seconds, "waited": waited})
        self._saved = self._keeper.save(position, self._sampler.state_dict(), test["accuracy"])
        self._commit_at(self._sampler.state_dict())
        return EpochResult(
            epoch=position.epochs,
            step=position.step,
            loss=train["loss"],
            accuracy=train["accuracy"],
            test_loss=test["loss"],
            test_accuracy=test["accuracy"],
            seconds=times["seconds"],
            images_per_second=sum(epoch.samples) / times["seconds"],
            communication=times["waited"] / times["seconds"],
            checkpoint=self._saved,
        )

    def _commit_at(self, data: Mapping[str, Any]) -> None:
        if self._commit is None:
            return
        position = self._position
        # A worker's place may be another's next time.
        sums = None
        if position.within_epoch:
            sums = verbs.allgather_object(position.sums, "hvdsync.train.sums")
        position.trained = position.within_epoch and data["epoch"] > position.epochs
        self._commit(Standpoint(position, sums, data))

    def _take_up(self, start: Standpoint) -> None:
        self._position = replace(start.position, sums=own_sums(start.sums))
        self._resumed_from = self._worker.guard.steps_before = self._position.step
        self._sampler.load_state_dict(dict(start.data))
        self._worker.draw_own_noise(self._position.step)

    def _meets_after(self, step: int, *, anyway: bool) -> bool:
        """Whether ranks meet after this step: to ask elsewhere is to wait for the slowest of them.

        With ``anyway`` they do, whatever the rule.
        """
        rule = self._config.rule
        if self._worker.shared is not None:
            return self._own_pace.all_are_here(step, self._worker.shared, meets=anyway)
        if anyway or not isinstance(rule, LocalRule) or step <= rule.warmup_steps:
            return True
        return bool(rule.is_due(step, 0))

    def _is_to_stop(self) -> bool:
        self._wishes_to_stop()
        return self._preemption.requested()

    def _wishes_to_stop(self) -> bool:
        if self._limit.reached():
            self._preemption.request(f"the time limit of {60 * (self._config.max_time or 0):g} s")
        return self._preemption.wish is not None

    def _stop(self, seconds: float) -> Stopped:
        if self._stragglers:
            self._stragglers.report()
        self._keeper.close()
        stopped = Stopped(
            self._preemption.reason,
            epochs=self._position.epochs,
            step=self._position.step,
            seconds=seconds,
            checkpoint=self._saved,
        )
        self._listener.run_stopped(stopped)
        return stopped

    def _evaluate(self) -> Mapping[str, float]:
        indices = evaluation_share(self._job.dataset)
        return _over_ranks(self._worker.evaluate(indices) if len(indices) else Tally())

    def _restore(self) -> None:
        position = self._keeper.restore(self._sampler)
        if position is not None:
            self._position = position
            self._resumed_from = self._worker.guard.steps_before = position.step

    def _facts(self) -> RunFacts:
        return RunFacts(
            config=self._config,
            workers=verbs.size(),
            device=self._worker.device,
            parameters=sum(w.size for w in self._job.network.initial_weights(0)),
            train_samples=len(self._job.dataset.x_train),
            test_samples=len(self._job.dataset.x_test),
            first_epoch=self._position.epochs,
            resumed_from=self._resumed_from,
            directory=self._directory,
            within_epoch=self._position.within_epoch,
        )

    def _summarize(self, results: list[EpochResult], seconds: float) -> Summary:
        trained = sum(r.seconds for r in results)
        if results:
            last = results[-1]
            test = {"loss": last.test_loss, "accuracy": last.test_accuracy}
        else:
            test = dict(self._evaluate())
        return Summary(
            epochs=self._position.epochs,
            step=self._position.step,
            test_loss=test["loss"],
            test_accuracy=test["accuracy"],
            best_test_accuracy=self._position.best["accuracy"],
            best_epoch=self._position.best["epoch"],
            seconds=seconds,
            images_per_second=(
                sum(r.images_per_second * r.seconds for r in results) / trained if results else None
            ),
            communication=(
                sum(r.communication * r.seconds for r in results) / trained if results else None
            ),
            checkpoint=self._saved,
        )


def _over_ranks(tally: Tally) -> Mapping[str, float]:
    """Loss and accuracy over the samples of all ranks."""
    count = max(tally.samples, 1)
    means = {"loss": tally.loss / count, "accuracy": tally.right / count}
    return verbs.average_metrics(means, weight=tally.samples)
