"""In: threads that work, sleep or are gone. Out: proof of who is waited for, and for how long."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator

import pytest

from hvdsync.comm import runtime_threads


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    runtime_threads.forget()


def test_a_thread_that_works_is_waited_for_until_it_sleeps() -> None:
    done, end = threading.Event(), threading.Event()

    def work() -> None:
        for _ in range(5):
            hashlib.sha256(bytes(2**25))  # some 20 ms without Python's lock
        done.set()
        end.wait()

    with runtime_threads.noticed():
        thread = threading.Thread(target=work)
        thread.start()
    runtime_threads.settle(60)
    assert done.is_set()
    end.set()
    thread.join()


def test_threads_that_are_gone_or_never_were_are_not_waited_for() -> None:
    runtime_threads.settle(60)
    with runtime_threads.noticed():
        thread = threading.Thread(target=time.sleep, args=(0.05,))
        thread.start()
    assert runtime_threads.known()
    thread.join()
    runtime_threads.settle(60)
