"""The update rule that the options of a run name, and what does not go with it."""

from __future__ import annotations

import re

import pytest

from hvdsync.comm.launch import LaunchInfo
from hvdsync.sync.update_rules import Asynchronous, DiLoCo, LocalSGD, Synchronous
from hvdsync.train.cli import _refuse
from hvdsync.train.config import TrainConfig

FIXED = LaunchInfo("horovodrun", rank=0, size=2, local_rank=0, local_size=2)


def test_the_options_name_a_rule() -> None:
    assert TrainConfig().rule == Synchronous()
    options = {"period": 8, "update_warmup": 20, "fragments": 2}
    assert TrainConfig(update="local-sgd", **options).rule == LocalSGD(8, 20, 2)  # type: ignore[arg-type]
    diloco = TrainConfig(update="diloco", outer_lr=0.5, outer_momentum=0.8, **options)  # type: ignore[arg-type]
    assert diloco.rule == DiLoCo(8, 0.5, 0.8, 20, 2)
    assert TrainConfig(update="async").rule == Asynchronous()
    assert TrainConfig(update="async", staleness=4).rule == Asynchronous(4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"update": "diloco", "engine": "ddp"}, "--update diloco: .*in every backward pass"),
        ({"update": "local-sgd", "compression": "fp16"}, "--update local-sgd: .*rounded away"),
        ({"update": "diloco", "compression": "onebit"}, "--update diloco: .*error feedback"),
        ({"update": "async", "engine": "ddp"}, "--update async: .*in every backward pass"),
        ({"update": "async", "compression": "fp16"}, "--update async: .*nothing of it may be lost"),
        ({"update": "diloco", "period": 4, "fragments": 5}, "--update diloco: .*fragments is 5"),
        ({"update": "async"}, "--update async: .*over Gloo; .*`horovodrun --mpi -np 2 "),
    ],
)
def test_a_combination_without_sense_is_refused(options: dict[str, object], reason: str) -> None:
    assert re.match(reason, _refuse(TrainConfig(**options), FIXED))  # type: ignore[arg-type]


def test_differences_may_travel_in_halves() -> None:
    assert _refuse(TrainConfig(update="diloco", compression="fp16"), FIXED) == ""


def test_asynchronous_workers_are_started_over_mpi_or_alone() -> None:
    for launcher, size in (("mpirun", 2), ("none", 1)):
        launch = LaunchInfo(launcher, rank=0, size=size, local_rank=0, local_size=size)
        assert _refuse(TrainConfig(update="async"), launch) == ""
