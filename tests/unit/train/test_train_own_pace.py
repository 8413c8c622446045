"""Ranks at their own pace are brought to one step by a wish of one; each is a thread here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from hvdsync.train.own_pace import OwnPace

SECONDS = 30
STEPS = 10


class Ranks:
    """What some ranks share: a call, and meetings that gather a number of each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_called = threading.Event()
        self.meetings: list[dict[int, int]] = [{}]
        self._barrier = threading.Barrier(size)

    def meet(self, rank: int, number: int) -> list[int]:
        self._barrier.wait(SECONDS)
        meeting = self.meetings[-1]
        meeting[rank] = number
        self._barrier.wait(SECONDS)
        if rank == 0:
            self.is_called.clear()
            self.meetings.append({})
        self._barrier.wait(SECONDS)
        return [meeting[other] for other in range(self.size)]


class Rank:
    def __init__(self, ranks: Ranks, number: int) -> None:
        self.ranks, self.number = ranks, number

    @property
    def called(self) -> bool:
        return self.ranks.is_called.is_set()

    def call(self) -> None:
        self.ranks.is_called.set()

    def meet(self, number: int) -> list[int]:
        return self.ranks.meet(self.number, number)


def all_stop(
    size: int,
    wishes: Callable[[int, int], bool],
    before_asking: Callable[[Ranks, int, int], None] = lambda ranks, rank, step: None,
) -> list[list[int]]:
    """The steps after which each rank was told that all are there, up to the first with a wish."""
    ranks = Ranks(size)

    def run(rank: int) -> list[int]:
        step = 0
        pace = OwnPace(lambda: wishes(rank, step))
        shared = Rank(ranks, rank)
        told = []
        for step in range(1, STEPS + 1):
            before_asking(ranks, rank, step)
            if pace.all_are_here(step, shared, meets=step % 5 == 0):
                told.append(step)
        return told

    with ThreadPoolExecutor(size) as pool:
        return [future.result(SECONDS) for future in [pool.submit(run, r) for r in range(size)]]


def test_without_a_wish_ranks_meet_where_all_have_something_to_do() -> None:
    assert all_stop(3, lambda rank, step: False) == [[5, 10]] * 3


@pytest.mark.parametrize("ahead", [3, 4])
def test_who_is_behind_catches_up_with_the_furthest(ahead: int) -> None:
    reached = threading.Event()

    def before_asking(ranks: Ranks, rank: int, step: int) -> None:
        if rank == 1 and step == 2:
            assert reached.wait(SECONDS)
        if rank == 0 and step == ahead:
            reached.set()
            assert ranks.is_called.wait(SECONDS)

    found = all_stop(2, lambda rank, step: rank == 1 and step == 2, before_asking)
    assert found == [[ahead, 5, 10]] * 2


def test_who_waits_at_a_step_that_meets_is_caught_up_with() -> None:
    # Rank 0 is at step 5, where all meet, before rank 1 wishes to stop at its second.
    at_five = threading.Event()

    def before_asking(ranks: Ranks, rank: int, step: int) -> None:
        if rank == 0 and step == 5:
            at_five.set()
        if rank == 1 and step == 2:
            assert at_five.wait(SECONDS)

    found = all_stop(2, lambda rank, step: rank == 1 and step == 2, before_asking)
    assert found == [[5, 10]] * 2
