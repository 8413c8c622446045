"""The verdict on who holds the others up, from what ranks measured."""

import numpy as np
import pytest

from hvdsync.guard.straggler_report import judge
from hvdsync.guard.time_split import EVIDENCE

IDLE = dict.fromkeys(EVIDENCE, 0.0)


def rank(steps=10, *, whole=1.0, data=0.0, stalled=0.0, checkpoint=0.0):
    return np.tile([whole, data, stalled, checkpoint], (steps, 1))


def verdict(*ranks, evidence=None, slow=0):
    rows = [[{**IDLE, **(evidence or {})}[name] for name in EVIDENCE] for _ in ranks]
    return judge(11, np.stack(ranks), np.array(rows))


def test_what_only_others_stand_still_for_is_waiting_and_the_rest_is_communication():
    report = verdict(rank(data=0.1, stalled=0.7), rank(data=0.6, stalled=0.2), rank(stalled=0.5))
    parts = {kind: values[:, 0].round(9).tolist() for kind, values in report.seconds.items()}
    assert parts == {
        "data": [0.1, 0.6, 0.0],
        "compute": [0.2, 0.2, 0.5],
        "waiting": [0.5, 0.0, 0.3],
        "communication": [0.2, 0.2, 0.2],
        "checkpoint": [0.0, 0.0, 0.0],
    }
    assert (report.first_step, report.last_step) == (11, 20)
    assert (report.slowest, report.kind) == (1, "data")
    assert report.excess == pytest.approx(0.8 - (0.3 + 0.5) / 2)
    assert report.lost == pytest.approx(report.excess)
    assert "steps 11 to 20: rank 1 is the slowest, with 800 ms a step of its own" in report.text
    assert "Cause: data, 600 ms a step where others take 50 ms" in report.text


def test_a_rank_that_saves_is_named_for_it():
    report = verdict(rank(checkpoint=0.5, stalled=0.1), rank(stalled=0.6))
    assert (report.slowest, report.kind, report.why) == (0, "checkpoint", "it saves")


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        ({"data_cpu": 0.3, "data_wanted": 4.0}, "it is idle there: its loader sleeps"),
        ({"data_cpu": 5.0}, "it computes there: decoding"),
        ({"data_cpu": 1.0, "data_wanted": 5.5}, "it computes there: decoding"),
        ({"data_cpu": 0.3, "data_read": 2**20 * 60}, "it reads files there: 6 MiB a step"),
        ({"data_cpu": 0.3, "children_cpu": 5.0}, "it computes there in loader workers"),
        (
            {"data_cpu": 0.3, "data_read": 100, "children_read": 2**20 * 60},
            "it reads files there in loader workers: 6 MiB a step, 10 MiB/s",
        ),
    ],
)
def test_waiting_for_data_is_told_by_what_went_on_meanwhile(evidence, words):
    report = verdict(rank(data=0.6, stalled=0.1), rank(stalled=0.7), evidence=evidence)
    assert (report.slowest, report.kind) == (0, "data")
    assert report.why.startswith(words)


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        ({"cpu": 1.5}, "it is mostly idle there"),
        ({"cpu": 8.0}, "it is busy there: more work than others"),
        (
            {"cpu": 4.0, "wanted": 8.5, "delayed": 4.0},
            "it is busy there, and others have its processors for 400",
        ),
        # A thread that spins while it waits for others is no work.
        ({"cpu": 4.0, "data_cpu": 2.0}, "it is mostly idle there"),
    ],
)
def test_computing_is_told_by_the_processor(evidence, words):
    report = verdict(rank(stalled=0.1), rank(stalled=0.8), evidence=evidence)
    assert (report.slowest, report.kind) == (0, "compute")
    assert report.why.startswith(words)


def test_one_rank_has_nobody_to_hold_up():
    report = verdict(rank(data=0.25))
    assert (report.slowest, report.excess, report.lost, report.kind) == (0, 0.0, 0.0, "compute")
    assert "data 250 ms, compute 750 ms, checkpoint 0 ms a step" in report.text
