"""Each rank takes the GPU of its local rank; a shortage is told with both numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from hvdsync.comm import verbs
from hvdsync.errors import HvdsyncError
from hvdsync.train.devices import Device, agree, choose


def test_a_rank_takes_the_gpu_of_its_local_rank(pretend: Callable[..., None]) -> None:
    for rank, gpu in ((0, 0), (1, 1), (2, 0), (3, 1)):
        pretend(rank, 4, local_size=2)
        assert choose("auto", 2) == Device(gpu)
        assert choose("cuda", 8) == Device(gpu)


def test_the_cpu_is_taken_when_asked_for(pretend: Callable[..., None]) -> None:
    pretend(0, 1)
    assert choose("cpu", 4) == Device(None)


def test_a_whole_node_takes_the_cpu_when_it_has_fewer_gpus_than_ranks(
    pretend: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    for rank in range(3):
        pretend(rank, 3)
        device = choose("auto", 2)
        assert device.gpu is None
        assert "2 GPU(s)" in device.shortage and "3 rank(s)" in device.shortage
    pretend(0, 3)
    with caplog.at_level(logging.WARNING):
        agree_among(device, device, device, wanted="auto")
    assert "2 GPU(s)" in caplog.text and "3 rank(s)" in caplog.text


def agree_among(*devices: Device, wanted: str) -> None:
    """What rank 0 concludes from the choices of all ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verbs, "allgather_object", lambda *_: [d.shortage for d in devices])
        agree(wanted, devices[0])  # type: ignore[arg-type]


def test_a_machine_without_gpus_is_no_news(
    pretend: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    pretend(0, 2)
    device = choose("auto", 0)
    agree_among(device, device, wanted="auto")
    assert device.gpu is None and caplog.text == ""


def test_a_shortage_is_an_error_when_gpus_were_demanded(pretend: Callable[..., None]) -> None:
    pretend(0, 4)
    device = choose("cuda", 1)
    with pytest.raises(HvdsyncError, match=r"--device cuda: 1 GPU\(s\).* 4 rank\(s\)"):
        agree_among(device, device, device, device, wanted="cuda")


def test_some_ranks_on_gpus_and_some_on_cpus_is_an_error(pretend: Callable[..., None]) -> None:
    pretend(0, 4, local_size=2)
    rich, poor = choose("auto", 2), choose("auto", 1)
    with pytest.raises(HvdsyncError, match=r"1 GPU\(s\) .* 2 rank\(s\)"):
        agree_among(rich, rich, poor, poor, wanted="auto")
