"""Sums through memory in common, with all ranks played by one process."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from hvdsync.comm import in_flight
from hvdsync.sync.host_sum import HostSum, Slot, aligned, join


def ranks_of(
    size: int, length: int, scale: float, has_ended=lambda rank: None, *, in_place: bool = False
) -> list[HostSum]:
    flags = [np.zeros(3, np.int64) for _ in range(size)]
    arrays = [np.zeros(length, np.float32) for _ in range(size)]
    return [
        HostSum(
            Slot(f"sum of {r}", np.zeros(length, np.float32), scale, in_place),
            flags,
            arrays,
            r,
            has_ended,
        )
        for r in range(size)
    ]


# A length that is no multiple of ranks or chunks, above what is always added up by everyone.
@pytest.mark.parametrize("length", [5, 70_001])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("in_place", [False, True])
def test_all_ranks_get_the_scaled_sum_at_every_turn(size: int, length: int, in_place: bool) -> None:
    ranks = ranks_of(size, length, 1 / size, in_place=in_place)
    assert all((rank.result is rank.mine) == (in_place and length > 5) for rank in ranks)
    for turn in range(3):
        values = [np.arange(length, dtype=np.float32) * (r + 1) + turn for r in range(size)]
        for rank, value in zip(ranks, values, strict=True):
            rank.clear()
            rank.mine[:] = value
            rank.post()
        done = [False]
        while not all(done):
            assert not any(done)  # all have the same way to go
            done = [rank.advance() for rank in ranks]
        expected = sum(values[1:], values[0]) * np.float32(1 / size)
        for rank in ranks:
            np.testing.assert_array_equal(rank.result, expected)


def test_an_array_is_not_filled_anew_before_all_have_read_it() -> None:
    first, second = ranks_of(2, 4, 1.0)
    for rank in (first, second):
        rank.clear()
        rank.post()
    assert first.advance()
    filling = threading.Thread(target=first.clear)
    filling.start()
    filling.join(0.05)
    assert filling.is_alive()
    assert second.advance()
    filling.join()


def test_a_sum_in_place_is_the_callers_only_when_all_have_read_it() -> None:
    first, second = ranks_of(2, 70_001, 1.0, in_place=True)
    for rank in (first, second):
        rank.clear()
        rank.mine[:] = 1
        rank.post()
    assert not first.advance() and not second.advance()  # a share each
    assert not first.advance()  # has read the other's
    finishing = threading.Thread(target=first.advance)
    finishing.start()
    finishing.join(0.05)
    assert finishing.is_alive()
    assert not second.advance()
    finishing.join()
    assert second.advance()
    assert first.result.tolist() == second.result.tolist() == [2] * 70_001


def test_a_result_handed_over_is_written_again_only_when_nothing_is_left_of_it() -> None:
    slot = Slot("handed over", aligned(4, np.dtype(np.float32)), 1.0)
    flags, arrays = [np.zeros(3, np.int64)] * 2, [np.zeros(4, np.float32)] * 2
    summed = HostSum(slot, flags, arrays, 0, lambda rank: None)
    kept = summed.hand_over()[1:3].reshape(2, 1)
    second = summed.hand_over()
    assert not np.shares_memory(kept, second)
    third = summed.hand_over()
    assert not any(np.shares_memory(third, other) for other in (kept, second))
    del kept
    fourth, fifth = summed.hand_over(), summed.hand_over()
    assert np.shares_memory(fifth, slot.result)
    assert not any(np.shares_memory(fifth, other) for other in (second, third, fourth))


def test_a_rank_that_has_joined_adds_zeros_to_what_the_others_begin() -> None:
    first, second = ranks_of(2, 4, 1.0)
    second.mine[:] = 7  # of its last turn

    def others_go_on() -> int:
        for turn in (1, 2):
            first.clear()
            first.mine[:] = turn
            first.post()
            assert first.advance()
            assert first.result.tolist() == [turn] * 4
        return 0

    assert join(others_go_on) == 0
    assert first._turn == second._turn == 2


def test_what_waits_is_listed_and_ends_with_the_rank_that_it_waits_for() -> None:
    listed = []

    def has_ended(rank: int) -> BaseException:
        listed.extend(name for name, _ in in_flight.listed())
        return RuntimeError(f"rank {rank} has ended")

    first, _ = ranks_of(2, 4, 1.0, has_ended)
    first.clear()
    first.post()
    with pytest.raises(RuntimeError, match="rank 1 has ended"):
        first.advance()
    assert listed == ["sum of 0"]
    assert in_flight.listed() == []
