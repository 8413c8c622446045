"""Signals become one verdict; handlers are there only between install and remove."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hvdsync.checkpoint.preemption import Preemption
from hvdsync.comm import recurring, world
from hvdsync.comm.communicator import SingleProcess
from hvdsync.errors import HvdsyncError


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Fails a test that leaves a handler behind."""
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]
    yield
    after = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)]
    assert after == before
    world.deactivate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_requested_from_then_on(number: int) -> None:
    with Preemption() as preemption:
        assert preemption.requested() is False
        send(number)
        assert preemption.wish == signal.Signals(number).name
        assert preemption.requested() is True
        assert preemption.requested() is True
    assert preemption.reason == f"{signal.Signals(number).name} on rank 0"


def test_nothing_is_installed_before_the_call_nor_left_after_it() -> None:
    before = signal.getsignal(signal.SIGTERM)
    preemption = Preemption()
    assert signal.getsignal(signal.SIGTERM) is before
    assert preemption.install() is preemption
    preemption.install()
    assert signal.getsignal(signal.SIGTERM) is not before
    preemption.remove()
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_handler_that_was_there_is_called_too_and_comes_back() -> None:
    heard: list[int] = []

    def before(number: int, frame: Any) -> None:
        heard.append(number)

    original = signal.signal(signal.SIGUSR1, before)
    try:
        with Preemption() as preemption:
            send(signal.SIGUSR1)
            assert heard == [signal.SIGUSR1]
            assert preemption.requested()
        send(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, original)


def test_a_handler_that_somebody_set_meanwhile_stays() -> None:
    original = signal.getsignal(signal.SIGUSR1)
    with Preemption():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    signal.signal(signal.SIGUSR1, original)


def test_other_signals_and_another_code_can_be_chosen() -> None:
    with Preemption(signals=[signal.SIGUSR2], exit_code=75) as preemption:
        send(signal.SIGUSR2)
        assert preemption.requested()
        with pytest.raises(SystemExit) as end:
            preemption.exit()
    assert end.value.code == 75


def test_a_wish_can_be_spoken_without_a_signal() -> None:
    preemption = Preemption()
    preemption.request("the time limit")
    assert preemption.requested()
    assert preemption.reason == "the time limit on rank 0"


def test_the_second_signal_ends_the_process_at_once() -> None:
    program = """
import os, signal
from hvdsync.checkpoint.preemption import Preemption
with Preemption():
    os.kill(os.getpid(), signal.SIGUSR1)
    print("alive", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("not reached", flush=True)
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout == "alive\n"
    assert run.returncode == -signal.SIGTERM


def test_another_thread_is_told_that_it_cannot_listen() -> None:
    raised: list[BaseException] = []

    def install() -> None:
        try:
            Preemption().install()
        except HvdsyncError as error:
            raised.append(error)

    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


class Pair(SingleProcess):
    """Two ranks, of which the other says what it is told to; counts exchanges."""

    size = 2

    def __init__(self, wish: bool, steps: int) -> None:
        self.other = np.array([wish, -steps], np.int64)
        self.exchanges = 0

    def allreduce(self, array: Any, op: Any, name: str, group: Any = None) -> Any:
        assert op == "max"
        self.exchanges += 1
        return np.maximum(array, self.other)

    def allgather(self, array: Any, name: str, group: Any = None) -> Any:
        return np.concatenate([array, array])


def test_the_wish_of_another_rank_is_the_verdict_here() -> None:
    world.activate(Pair(wish=True, steps=1))
    preemption = Preemption()
    assert preemption.wish is None
    preemption.request("SIGTERM")
    assert preemption.requested()
    # The pretended other rank repeats what this one says.
    assert preemption.reason == "SIGTERM on rank 0, 1"


def test_ranks_exchange_at_the_interval_that_suits_the_slowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(recurring.time, "monotonic", lambda: now[0])
    pair = Pair(wish=False, steps=5)
    world.activate(pair)
    preemption = Preemption()
    exchanged = []
    for _ in range(40):
        now[0] += 0.01  # 25 steps of this rank in a quarter of a second
        assert not preemption.requested()
        exchanged.append(pair.exchanges)
    # At the first step, and then after as many as the other rank has in that time.
    assert [i for i in range(40) if exchanged[i] > (exchanged[i - 1] if i else 0)] == [
        0, 5, 10, 15, 20, 25, 30, 35,
    ]  # fmt: skip
    pair.other[1] = -1000
    for _ in range(50):
        now[0] += 0.01
        preemption.requested()
    assert pair.exchanges == 8 + 2  # the one that is due, then every 25 steps


def test_a_fixed_interval_is_kept() -> None:
    pair = Pair(wish=False, steps=1000)
    world.activate(pair)
    preemption = Preemption(every=4)
    for _ in range(21):
        preemption.requested()
    assert pair.exchanges == 6  # 1, 5, 9, 13, 17, 21
    with pytest.raises(ValueError, match="every is 0"):
        Preemption(every=0)


def test_a_worker_forked_from_a_rank_ends_when_it_is_told_to() -> None:
    # Else who starts it, tells it to end and waits for it, waits for ever.
    context = multiprocessing.get_context("fork")
    up = context.Event()

    def work() -> None:
        up.set()
        time.sleep(1000)

    with Preemption() as preemption:
        worker = context.Process(target=work)
        worker.start()
        try:
            assert up.wait(60)
            worker.terminate()
            worker.join(60)
            assert worker.exitcode == -signal.SIGTERM
        finally:
            worker.kill()
            worker.join()
        assert preemption.wish is None
