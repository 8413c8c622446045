"""What rank 0 shows and writes of a run: lines, a table, JSON lines and TensorBoard events."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hvdsync.guard.straggler_report import judge
from hvdsync.guard.time_split import EVIDENCE
from hvdsync.train import progress
from hvdsync.train.config import TrainConfig
from hvdsync.train.events import FILE, EventLog
from hvdsync.train.listener import (
    EpochResult,
    Everyone,
    Listener,
    RunFacts,
    Standing,
    Stopped,
    Summary,
)
from hvdsync.train.progress import Bar, Lines
from hvdsync.train.worker import Tally

FACTS = RunFacts(TrainConfig(), 4, "CPU", 1234, 1000, 100, 0, None, Path("runs/x/1"))
RESULT = EpochResult(
    epoch=1,
    step=40,
    loss=0.25,
    accuracy=0.9,
    test_loss=0.2,
    test_accuracy=0.9321,
    seconds=2.0,
    images_per_second=500.0,
    communication=0.125,
    checkpoint=Path("runs/x/1/step-00000040"),
)
SUMMARY = Summary(1, 40, 0.2, 0.9321, 0.9321, 1, 3.5, 500.0, 0.125, RESULT.checkpoint)


def run(listener: Listener, passes: int = 40) -> None:
    """An epoch of 1,000 samples, as the loop would tell it."""
    listener.run_begins(FACTS)
    listener.epoch_begins(1, 1000)
    for i in range(passes):
        done = i + 1
        listener.advanced(
            Standing(
                step=done,
                samples=25 * done,
                seconds=0.05 * done,
                learning_rate=0.5,
                tally=lambda: Tally(loss=2.0, right=3.0, samples=4),
            )
        )
    listener.epoch_ended(RESULT)
    listener.run_ended(SUMMARY)
    listener.close()


@pytest.fixture
def every_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines as if enough time passed between tenths of an epoch, and never too much."""
    monkeypatch.setattr(progress, "_SHORTEST_LINE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_LINE_SECONDS", 1e9)


@pytest.mark.usefixtures("every_tenth")
def test_plain_lines_have_no_control_characters_and_tell_the_epoch() -> None:
    text = io.StringIO()
    run(Lines(Console(file=text, force_terminal=False, width=80)))
    output = text.getvalue()
    assert "\x1b" not in output and "\r" not in output
    lines = output.splitlines()
    standing = [line for line in lines if " left" in line]
    assert [line.split()[2] for line in standing] == [f"{10 * i}%" for i in range(1, 10)]
    # 25 samples in 0.05 s: 500 images/s; half of 1,000 samples are left at the fifth line.
    assert standing[4] == ("epoch 1/3   50%  loss 0.5000  accuracy 75.0%  500 images/s  0:01 left")
    (result,) = (line for line in lines if "test accuracy 93.21%" in line)
    assert result.startswith("epoch 1/3  loss 0.2500  accuracy 90.00%")


def test_the_table_tells_the_outcome() -> None:
    text = io.StringIO()
    run(Lines(Console(file=text, force_terminal=False, width=80)))
    table = {
        cells[1].strip(): cells[2].strip()
        for cells in (line.split("│") for line in text.getvalue().splitlines())
        if len(cells) == 4
    }
    assert table == {
        "test accuracy": "93.21%",
        "test loss": "0.2000",
        "trained": "1 epoch(s), 40 steps",
        "wall time": "3.5 s",
        "images/s": "500 over all workers",
        "communication": "12% of training time",
        "checkpoint": "runs/x/1/step-00000040",
    }


def test_a_run_with_nothing_left_to_train_says_so() -> None:
    text = io.StringIO()
    lines = Lines(Console(file=text, force_terminal=False, width=80))
    lines.run_begins(
        RunFacts(TrainConfig(resume=True), 4, "CPU", 1234, 1000, 100, 3, 705, Path("runs/x/1"))
    )
    lines.run_ended(Summary(3, 705, 0.2, 0.93, 0.95, 2, 0.5, None, None, Path("runs/x/1")))
    assert "going on after epoch 3, step 705" in text.getvalue()
    assert "nothing is left to train: --epochs is 3" in text.getvalue()
    assert "images/s" not in text.getvalue()
    assert "95.00% after epoch 2" in text.getvalue()


@pytest.mark.usefixtures("every_tenth")
def test_the_rest_of_an_epoch_is_shown_as_part_of_the_whole() -> None:
    text = io.StringIO()
    lines = Lines(Console(file=text, force_terminal=False, width=80))
    lines.epoch_begins(2, 500, before=500)
    for done in (1, 10, 11, 19, 20):
        lines.advanced(Standing(done, 25 * done, 0.05 * done, 0.5, lambda: Tally(2.0, 3.0, 4)))
    shown = text.getvalue().splitlines()
    assert [line.split()[2] for line in shown] == ["75%", "98%"]
    # 250 of the 500 samples that were left, at 500 images/s.
    assert shown[0].endswith("500 images/s  0:00 left")


def test_a_run_that_ends_early_says_why_and_where_it_is_saved(tmp_path: Path) -> None:
    text = io.StringIO()
    lines = Lines(Console(file=text, force_terminal=False, width=80))
    log = EventLog(tmp_path)
    for listener in (lines, log):
        listener.run_stopped(Stopped("SIGTERM on rank 1", 2, 96, 3.5, Path("runs/x/step-00000096")))
    assert text.getvalue() == (
        "ended early by SIGTERM on rank 1: step 96 is saved in runs/x/step-00000096; --resume goes "
        "on from there\n"
    )
    log.close()
    (line,) = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert (line["event"], line["reason"], line["step"]) == ("stopped", "SIGTERM on rank 1", 96)


def test_output_that_nobody_reads_any_more_is_no_error() -> None:
    program = (
        "import sys\n"
        "from hvdsync.train.progress import make_display\n"
        "display = make_display()\n"
        "display.say('one')\n"
        "sys.stdin.readline()\n"
        "display.say('two')\n"
        "display.say('three')\n"
        "print('done', file=sys.stderr)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout and process.stderr
    assert process.stdout.readline() == "one\n"
    process.stdout.close()
    process.stdin.write("go on\n")
    process.stdin.close()
    assert process.stderr.read() == "done\n"
    assert process.wait(60) == 0
    process.stderr.close()


def test_the_bar_is_gone_after_the_epoch_and_results_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.0)
    terminal, text = io.StringIO(), io.StringIO()
    run(Bar(Console(file=text, width=100), Console(file=terminal, force_terminal=True, width=100)))
    drawn = terminal.getvalue()
    assert "loss 0.5000" in drawn and "500 images/s" in drawn and "0:01 left" in drawn
    assert drawn.endswith("\x1b[1A\x1b[2K") or "\x1b[2K" in drawn.rsplit("left", 1)[1]
    assert "test accuracy 93.21%" in text.getvalue()


def test_the_tally_is_asked_for_only_when_something_is_drawn() -> None:
    asked = []
    lines = Lines(Console(file=io.StringIO(), force_terminal=False))
    lines.epoch_begins(1, 1000)
    for i in range(100):
        lines.advanced(Standing(i, i, 0.1, 0.1, lambda: asked.append(1) or Tally()))  # type: ignore[func-returns-value]
    assert not asked


def test_events_are_one_json_object_a_line(tmp_path: Path) -> None:
    run(EventLog(tmp_path / "logs"))
    lines = [json.loads(line) for line in (tmp_path / "logs" / FILE).read_text().splitlines()]
    assert [line["event"] for line in lines] == ["run", "step", "step", "epoch", "end"]
    assert lines[0]["workers"] == 4 and lines[0]["config"]["optimizer"] == "adam"
    step = lines[1]
    assert (step["epoch"], step["step"], step["loss"], step["accuracy"]) == (1, 20, 0.5, 0.75)
    assert (step["learning_rate"], step["images_per_second"]) == (0.5, 500.0)
    assert lines[3]["test_accuracy"] == 0.9321 and lines[3]["communication"] == 0.125
    assert {k: lines[4][k] for k in asdict(SUMMARY)} == json.loads(
        json.dumps(asdict(SUMMARY), default=str)
    )
    assert all(isinstance(line["time"], float) for line in lines)


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path: Path) -> None:
    run(EventLog(tmp_path))
    run(EventLog(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [line["event"] for line in lines].count("run") == 2


def test_tensorboard_events_hold_the_same_scalars(tmp_path: Path) -> None:
    run(EventLog(tmp_path))
    (file,) = tmp_path.glob("events.out.tfevents.*")
    content = file.read_bytes()
    for tag in (b"step/loss", b"step/learning_rate", b"epoch/test_accuracy", b"epoch/loss"):
        assert tag in content


def compared(listener: Listener, is_news: bool) -> None:
    """25 steps of two ranks, of which the second takes a second for its data."""
    steps = np.zeros((2, 25, 4))
    steps[:, :, 0], steps[1, :, 1], steps[0, :, 2] = 1.25, 1.0, 1.0
    listener.compared(judge(101, steps, np.zeros((2, len(EVIDENCE)))), is_news)


def test_the_split_of_each_step_is_a_line_and_twenty_of_them_a_point(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    compared(log, is_news=False)
    log.close()
    *steps, verdict = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [line["step"] for line in steps] == list(range(101, 126))
    for line in steps:
        assert line["event"] == "seconds"
        assert (line["data"], line["waiting"], line["compute"]) == ([0, 1], [1, 0], [0.25, 0.25])
    told = [verdict[key] for key in ("event", "first_step", "step", "rank", "kind", "excess")]
    assert told == ["straggler", 101, 125, 1, "data", 1.0]
    (file,) = tmp_path.glob("events.out.tfevents.*")
    assert file.read_bytes().count(b"seconds/waiting") == 2


def test_a_slow_worker_is_a_line_when_it_is_news() -> None:
    text = io.StringIO()
    display = Lines(Console(file=text, force_terminal=False))
    compared(display, is_news=False)
    assert not text.getvalue()
    compared(display, is_news=True)
    assert text.getvalue().startswith("steps 101 to 125: rank 1 is the slowest")
    assert text.getvalue().count("\n") == 1


def test_every_listener_hears_everything(tmp_path: Path) -> None:
    text = io.StringIO()
    display = Lines(Console(file=text, force_terminal=False))
    everyone = Everyone(display, EventLog(tmp_path))
    compared(everyone, is_news=True)
    run(everyone)
    assert "rank 1 is the slowest" in text.getvalue()
    assert "test accuracy" in text.getvalue()
    assert len((tmp_path / FILE).read_text().splitlines()) == 26 + 5
