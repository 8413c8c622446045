"""Parameters shared through MPI's windows: nothing is lost, nobody waits, all end with the same.

What ranks push are whole numbers, whose sums are exact in any order.
"""

import numpy as np
import pytest

import hvdsync.torch as hvd
from hvdsync.comm import verbs, world
from hvdsync.errors import LaunchError, StalledRank
from hvdsync.sync.asynchronous import SharedParameters
from tests.parallel.ranks import assert_equal_arrays_on_all_ranks, wait_until


def whole_numbers(seed, shape, dtype):
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(dtype)


# Scalars, nothing at all, fewer than there are ranks, more than one operation carries.
SHAPES = [((), "float32"), ((0, 3), "float32"), ((3, 5), "float64"), ((70_001,), "float32")]


def test_the_sum_of_what_was_pushed_is_what_the_shared_parameters_moved_by(mpi):
    initial = [whole_numbers(0, shape, dtype) for shape, dtype in SHAPES]
    shared = SharedParameters(initial)
    pushed = [np.zeros_like(array) for array in initial]
    for step in range(10 + 5 * hvd.rank()):
        for i, (values, total) in enumerate(zip(shared.values, pushed, strict=True)):
            change = whole_numbers((hvd.rank(), step, i), values.shape, values.dtype)
            values += change
            total += change
        shared.exchange()
    assert shared.agree()
    assert shared.steps == 0
    everyone = verbs.allgather_object(pushed)
    for i, (values, before) in enumerate(zip(shared.values, initial, strict=True)):
        assert values.shape == before.shape and values.dtype == before.dtype
        np.testing.assert_array_equal(values, before + sum(theirs[i] for theirs in everyone))
    assert_equal_arrays_on_all_ranks(shared.values)


def test_a_rank_sees_its_own_change_and_those_that_came_before(mpi):
    shared = SharedParameters([np.zeros(hvd.size(), np.float32)])
    # One rank after the other: each pushes its step into its own place.
    for rank in range(hvd.size()):
        if rank == hvd.rank():
            shared.values[0][rank] += rank + 1
            shared.exchange()
            np.testing.assert_array_equal(
                shared.values[0], [r + 1 if r <= rank else 0 for r in range(hvd.size())]
            )
        world.current().barrier()


def test_no_rank_waits_for_another(mpi):
    shared = SharedParameters([np.zeros(hvd.size(), np.float32)])
    mine = shared.values[0][hvd.rank() : hvd.rank() + 1]
    if hvd.rank() == 0:
        # Takes no step before the last rank has taken all of its own.
        wait_until(lambda: (shared.exchange(), shared.values[0][-1] == 50)[1])
    else:
        for _ in range(50):
            mine += 1
            shared.exchange()
    shared.agree()
    np.testing.assert_array_equal(shared.values[0], [0] + [50] * (hvd.size() - 1))


@pytest.mark.parametrize("staleness", [0, 3])
def test_no_rank_is_further_ahead_of_the_slowest_than_its_staleness(mpi, staleness):
    shared = SharedParameters([np.zeros(hvd.size(), np.float32)], staleness=staleness)
    steps = shared.values[0]
    if hvd.rank() == 0:
        # The others come as far as they may without this one, which has taken no step.
        wait_until(lambda: all(shared._counters.read(r, 0) > staleness for r in shared._others))
    for step in range(1, 21):
        steps[hvd.rank()] += 1
        shared.exchange()
        assert steps[hvd.rank()] == step
        assert steps.min() >= step - staleness
    shared.agree()
    np.testing.assert_array_equal(steps, [20] * hvd.size())


def test_a_rank_at_a_meeting_holds_nobody_up(mpi):
    shared = SharedParameters([np.zeros(1, np.float64)], staleness=1)
    for _ in range(0 if hvd.rank() == 0 else 10):
        shared.values[0] += 1
        shared.exchange()
    shared.agree()
    assert shared.values[0] == 10 * (hvd.size() - 1)


def test_waiting_for_a_rank_that_makes_no_step_ends_with_an_error_that_names_it(mpi):
    shared = SharedParameters([np.zeros(1, np.float32)], staleness=1, wait_limit=0.2)
    if hvd.rank() == 1:
        shared.exchange()
        with pytest.raises(
            StalledRank, match=r"rank 1 of \d waits after 2 steps for rank 0, which has made 0"
        ):
            shared.exchange()
    world.current().barrier()
    shared.agree()


def test_a_reset_shares_what_rank_zero_has(mpi):
    initial = [np.full((2, 3), hvd.rank(), np.float32)]
    shared = SharedParameters(initial, staleness=2)
    np.testing.assert_array_equal(shared.values[0], np.zeros((2, 3)))
    shared.values[0] += 1
    shared.exchange()
    shared.values[0][:] = 7 if hvd.rank() == 0 else -1
    shared.reset()
    np.testing.assert_array_equal(shared.values[0], np.full((2, 3), 7))
    shared.values[0] += 1
    shared.exchange()
    shared.agree()
    np.testing.assert_array_equal(shared.values[0], np.full((2, 3), 7 + hvd.size()))


def test_a_meeting_that_one_rank_calls_is_heard_of_on_all_and_gathers_what_they_come_with(mpi):
    shared = SharedParameters([np.zeros(3, np.float32)])
    assert not shared.called
    world.current().barrier()
    if hvd.rank() == 1:
        shared.call()
    wait_until(lambda: shared.called)
    shared.values[0] += 1
    assert shared.meet(10 * hvd.rank()) == [10 * rank for rank in range(hvd.size())]
    assert not shared.called
    # What had not been pushed yet is pushed now.
    assert not shared.agree()
    np.testing.assert_array_equal(shared.values[0], [hvd.size()] * 3)
    shared.close()


def test_halves_and_whole_numbers_are_refused():
    with pytest.raises(ValueError, match="float32 or float64, found float16, int64"):
        SharedParameters([np.zeros(1, np.float16), np.zeros(1, np.int64)])


def test_ranks_over_gloo_are_told_how_to_start(gloo):
    with pytest.raises(LaunchError, match=f"horovodrun --mpi -np {hvd.size()}"):
        SharedParameters([np.zeros(1, np.float32)])
