"""What rank 0 shows of a run: a bar on a terminal or plain lines, and a table."""

from __future__ import annotations

import os
import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from hvdsync.guard.straggler_report import StragglerReport
from hvdsync.train.listener import EpochResult, Listener, RunFacts, Standing, Stopped, Summary

# A bar that is drawn more often costs training time where cores are few.
_REFRESH_SECONDS = 0.25
_LINE_SECONDS = 5.0
_SHORTEST_LINE_SECONDS = 0.5


class Display(Listener):
    """What a bar and lines have in common: the facts before, results of epochs, the table after.

    ``output`` gets what stays, the same on a terminal and in a file.
    """

    def __init__(self, output: Console) -> None:
        self._output = output
        self._epochs = 0
        self._title = ""
        self._total = 0
        self._done = 0
        self._drawn = 0.0
        self._before: Standing | None = None

    def run_begins(self, facts: RunFacts) -> None:
        config = facts.config
        self._epochs = config.epochs
        self.say(
            f"{config.framework}, {config.model} with {facts.parameters:,} weights, "
            f"{config.dataset} ({facts.train_samples:,} training and {facts.test_samples:,} test "
            f"samples)"
        )
        self.say(f"{facts.workers} worker(s), {config.batch_size} samples each; {facts.device}")
        if facts.resumed_from is not None:
            where = (
                f"within epoch {facts.first_epoch + 1}, after"
                if facts.within_epoch
                else f"after epoch {facts.first_epoch},"
            )
            self.say(f"going on {where} step {facts.resumed_from}, of {facts.directory}")
        elif config.resume:  # asked for, so its absence is news
            self.say(f"no checkpoint in {facts.directory} yet: starting from the beginning")
        if facts.first_epoch >= config.epochs:
            self.say(f"nothing is left to train: --epochs is {config.epochs}")

    def world_changed(self, facts: RunFacts) -> None:
        self.close()
        self._epochs = facts.config.epochs
        self.say(
            f"{facts.workers} worker(s) now; going on after step {facts.resumed_from}, within "
            f"epoch {facts.first_epoch + 1}"
        )

    def epoch_begins(self, epoch: int, samples: int, before: int = 0) -> None:
        self._title = f"epoch {epoch}/{self._epochs}"
        self._total, self._done = before + samples, before
        self._drawn = time.perf_counter()
        self._before = None

    def advanced(self, standing: Standing) -> None:
        if self._before is None:
            # The first pass is no measure of speed: frameworks compile in it.
            self._before, self._drawn = standing, time.perf_counter()
        else:
            self.draw(standing)

    def compared(self, report: StragglerReport, is_news: bool) -> None:
        if is_news:
            self.say(str(report))

    def draw(self, standing: Standing) -> None:
        """Show where the epoch stands, if it is time to."""
        raise NotImplementedError

    def numbers(self, standing: Standing) -> dict[str, Any]:
        """Rank 0's means so far, the speed of all ranks and the time left in the epoch."""
        assert self._before is not None
        tally = standing.tally()
        count = max(tally.samples, 1)
        seconds = standing.seconds - self._before.seconds
        values = {
            "loss": f"{tally.loss / count:.4f}",
            "accuracy": f"{tally.right / count:.1%}",
            "rate": "-",
            "left": "-",
        }
        if seconds > 0:
            rate = (standing.samples - self._before.samples) / seconds
            left = (self._total - self._done - standing.samples) / rate
            values["rate"] = f"{rate:,.0f}"
            values["left"] = f"{int(left // 60)}:{int(left % 60):02d}"
        return values

    def epoch_ended(self, result: EpochResult) -> None:
        self.say(
            f"{self._title}  loss {result.loss:.4f}  accuracy {result.accuracy:.2%}  "
            f"test accuracy {result.test_accuracy:.2%}  "
            f"{result.images_per_second:,.0f} images/s  {result.seconds:.1f} s"
        )

    def run_ended(self, summary: Summary) -> None:
        table = Table(show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        rows = {
            "test accuracy": f"{summary.test_accuracy:.2%}",
            "test loss": f"{summary.test_loss:.4f}",
            "best": f"{summary.best_test_accuracy:.2%} after epoch {summary.best_epoch}",
            "trained": f"{summary.epochs} epoch(s), {summary.step:,} steps",
            "wall time": f"{summary.seconds:.1f} s",
        }
        if summary.best_epoch in (0, summary.epochs):
            del rows["best"]
        if summary.images_per_second is not None and summary.communication is not None:
            rows["images/s"] = f"{summary.images_per_second:,.0f} over all workers"
            rows["communication"] = f"{summary.communication:.0%} of training time"
        rows["checkpoint"] = str(summary.checkpoint)
        for name, value in rows.items():
            table.add_row(name, escape(value))
        self._output.print(table)

    def run_stopped(self, stopped: Stopped) -> None:
        self.close()
        self.say(
            f"ended early by {stopped.reason}: step {stopped.step:,} is saved in "
            f"{stopped.checkpoint}; --resume goes on from there"
        )

    def say(self, text: str) -> None:
        """One line, however long: only a terminal wraps."""
        self._output.print(text, markup=False, highlight=False, soft_wrap=True)


class Lines(Display):
    """A line every few seconds or tenths of an epoch, for files and launchers that add prefixes."""

    def __init__(self, output: Console) -> None:
        super().__init__(output)
        self._tenth = 0

    def draw(self, standing: Standing) -> None:
        now = time.perf_counter()
        done = self._done + standing.samples
        tenth = 10 * done // self._total
        since = now - self._drawn
        passed_a_tenth = tenth > self._tenth and since >= _SHORTEST_LINE_SECONDS
        if tenth >= 10 or not (passed_a_tenth or since >= _LINE_SECONDS):
            return
        self._tenth, self._drawn = tenth, now
        numbers = self.numbers(standing)
        self.say(
            f"{self._title}  {done / self._total:4.0%}  loss {numbers['loss']}  "
            f"accuracy {numbers['accuracy']}  {numbers['rate']} images/s  {numbers['left']} left"
        )

    def epoch_begins(self, epoch: int, samples: int, before: int = 0) -> None:
        super().epoch_begins(epoch, samples, before)
        self._tenth = 10 * before // self._total


class Bar(Display):
    """A bar for each epoch on ``terminal``, gone when the epoch has its line of results."""

    def __init__(self, output: Console, terminal: Console) -> None:
        super().__init__(output)
        self._terminal = terminal
        self._progress: Progress | None = None

    def epoch_begins(self, epoch: int, samples: int, before: int = 0) -> None:
        super().epoch_begins(epoch, samples, before)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %"),
            TextColumn("loss {task.fields[loss]}  accuracy {task.fields[accuracy]}"),
            TextColumn("{task.fields[rate]} images/s"),
            TextColumn("{task.fields[left]} left"),
            console=self._terminal,
            transient=True,
            auto_refresh=False,
        )
        unknown: dict[str, Any] = dict.fromkeys(("loss", "accuracy", "rate", "left"), "-")
        self._task = self._progress.add_task(
            self._title, total=self._total, completed=before, **unknown
        )
        self._progress.start()

    def draw(self, standing: Standing) -> None:
        now = time.perf_counter()
        if self._progress is None or now - self._drawn < _REFRESH_SECONDS:
            return
        self._drawn = now
        self._progress.update(
            self._task,
            completed=self._done + standing.samples,
            refresh=True,
            **self.numbers(standing),
        )

    def epoch_ended(self, result: EpochResult) -> None:
        self.close()
        super().epoch_ended(result)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class _Output(Console):
    """Falls silent when nobody reads any more: a run whose launcher was killed still saves."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # Python writes out what is left when it ends, and would end with an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def make_display() -> Display:
    """A bar when standard error is a terminal, else lines; results go to standard output.

    ``mpirun`` gives ranks a pseudo-terminal for standard output that no one watches, so it is
    standard error that decides.
    """
    terminal = _Output(stderr=True)
    if terminal.is_terminal:
        return Bar(_Output(), terminal)
    return Lines(_Output(force_terminal=False))
