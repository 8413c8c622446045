"""The update rule that the options of a run name, and what does not go with it."""

from __future__ import annotations

import re

import pytest

from hvdsync.comm.launch import LaunchInfo
from hvdsync.sync.update_rules import DiLoCo, LocalSGD, Synchronous
from hvdsync.train.cli import _refuse
from hvdsync.train.config import TrainConfig

FIXED = LaunchInfo("horovodrun", rank=0, size=2, local_rank=0, local_size=2)


def test_the_options_name_a_rule() -> None:
    assert TrainConfig().rule == Synchronous()
    options = {"period": 8, "update_warmup": 20}
    assert TrainConfig(update="local-sgd", **options).rule == LocalSGD(8, 20)  # type: ignore[arg-type]
    diloco = TrainConfig(update="diloco", outer_lr=0.5, outer_momentum=0.8, **options)  # type: ignore[arg-type]
    assert diloco.rule == DiLoCo(8, 0.5, 0.8, 20)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"update": "diloco", "engine": "ddp"}, "--update diloco: .*in every backward pass"),
        ({"update": "local-sgd", "compression": "fp16"}, "--update local-sgd: weights themselves"),
    ],
)
def test_a_combination_without_sense_is_refused(options: dict[str, str], reason: str) -> None:
    assert re.match(reason, _refuse(TrainConfig(**options), FIXED))  # type: ignore[arg-type]


def test_differences_may_travel_in_halves() -> None:
    assert _refuse(TrainConfig(update="diloco", compression="fp16"), FIXED) == ""
