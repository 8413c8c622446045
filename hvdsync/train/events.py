"""A run on disk: what a listener hears in, TensorBoard events and one JSON line per event out."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdsync.guard.straggler_report import StragglerReport
from hvdsync.train.listener import EpochResult, Listener, RunFacts, Standing, Stopped, Summary

FILE = "events.jsonl"
# Reading the loss costs a GPU a pause, and a curve needs no more points.
_EVERY_STEPS = 20


class EventLog(Listener):
    """Writes ``events.jsonl`` and TensorBoard's files into ``directory``.

    Each line is an object with ``event`` ("run", "world", "step", "seconds", "straggler", "epoch",
    and "end" or "stopped"), ``time`` (seconds since 1970) and the numbers. A resumed run appends.
    Steps are every 20th, with rank 0's means of the epoch so far; epochs have the means over all
    ranks. "seconds" has, for each step, a list over ranks of what its time was spent on;
    "straggler" the verdict on a stretch of them. TensorBoard gets means over ranks and 20 steps.
    """

    def __init__(self, directory: Path) -> None:
        # Slow to import, and few runs log.
        from tensorboardX import SummaryWriter

        directory.mkdir(parents=True, exist_ok=True)
        self._lines = (directory / FILE).open("a", buffering=1)
        self._board = SummaryWriter(str(directory))
        self._written = 0
        self._epoch = 0

    def run_begins(self, facts: RunFacts) -> None:
        self._write("run", **asdict(facts))
        self._written = facts.resumed_from or 0

    def world_changed(self, facts: RunFacts) -> None:
        self._write("world", workers=facts.workers, step=facts.resumed_from)
        self._written = facts.resumed_from or 0

    def epoch_begins(self, epoch: int, samples: int, before: int = 0) -> None:
        self._epoch = epoch

    def advanced(self, standing: Standing) -> None:
        if standing.step < self._written + _EVERY_STEPS:
            return
        self._written = standing.step
        tally = standing.tally()
        count = max(tally.samples, 1)
        scalars = {
            "loss": tally.loss / count,
            "accuracy": tally.right / count,
            "learning_rate": standing.learning_rate,
            "images_per_second": standing.samples / standing.seconds,
        }
        self._write("step", epoch=self._epoch, step=standing.step, **scalars)
        self._draw("step", scalars, standing.step)

    def compared(self, report: StragglerReport, is_news: bool) -> None:
        for i, step in enumerate(range(report.first_step, report.last_step + 1)):
            seconds = {k: values[:, i].round(6).tolist() for k, values in report.seconds.items()}
            self._write("seconds", step=step, **seconds)
        self._write(
            "straggler",
            first_step=report.first_step,
            step=report.last_step,
            rank=report.slowest,
            excess=report.excess,
            lost=report.lost,
            kind=report.kind,
            text=report.text,
        )
        for first in range(report.first_step, report.last_step + 1, _EVERY_STEPS):
            i = first - report.first_step
            means = {k: v[:, i : i + _EVERY_STEPS].mean() for k, v in report.seconds.items()}
            self._draw("seconds", means, min(first + _EVERY_STEPS - 1, report.last_step))

    def epoch_ended(self, result: EpochResult) -> None:
        values = asdict(result)
        self._write("epoch", **values)
        scalars = {k: v for k, v in values.items() if isinstance(v, float)}
        self._draw("epoch", scalars, result.step)

    def run_ended(self, summary: Summary) -> None:
        self._write("end", **asdict(summary))

    def run_stopped(self, stopped: Stopped) -> None:
        self._write("stopped", **asdict(stopped))

    def close(self) -> None:
        self._lines.close()
        self._board.close()

    def _write(self, event: str, **values: Any) -> None:
        line = {"event": event, "time": time.time(), **values}
        self._lines.write(json.dumps(line, default=str) + "\n")

    def _draw(self, family: str, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._board.add_scalar(f"{family}/{name}", value, step)
