"""What a rank waits for can be read while it waits; a rank that comes late is no matter."""

import os
import signal
import time

import pytest
import torch

import hvdsync.torch as hvd
from hvdsync.guard.watch import watch
from hvdsync.guard.watch.pending import Pending

pytestmark = pytest.mark.usefixtures("several_ranks")


@pytest.fixture
def pending():
    return Pending(hvd.ops.hvd.mpi_ops._basics)


def until(happened):
    """Waits for what is certain to happen."""
    while not happened():
        time.sleep(0.01)


def test_what_was_submitted_is_pending_until_all_have_come(pending):
    first = hvd.rank() == 0
    handle = hvd.allreduce_async(torch.ones(2), name="early") if first else None
    if first:
        (operation,) = pending.read()
        assert operation.name.endswith("early")
        assert operation.process_set == 0
        until(lambda: pending.read()[0].seconds > 0.2)
    hvd.barrier()  # the others come when rank 0 has looked
    if not first:
        handle = hvd.allreduce_async(torch.ones(2), name="early")
    assert hvd.synchronize(handle).tolist() == [1, 1]
    assert pending.read() == []


def test_operations_are_listed_oldest_first_and_in_full(pending):
    names = [f"operation {i} {'x' * 100}" for i in range(100)]
    first = hvd.rank() == 0
    handles = [hvd.allreduce_async(torch.ones(1), name=n) for n in names] if first else []
    if first:
        listed = [operation.name.removeprefix("allreduce.") for operation in pending.read()]
        assert listed == names
    hvd.barrier()
    if not first:
        handles = [hvd.allreduce_async(torch.ones(1), name=n) for n in names]
    for handle in handles:
        hvd.synchronize(handle)
    assert pending.read() == []


def test_a_thread_that_waits_leaves_its_core_to_others():
    hvd.barrier()
    used = time.thread_time()
    if hvd.rank() == hvd.size() - 1:
        time.sleep(1)
    hvd.allreduce(torch.ones(2), name="late")
    # In a loop it would be a second, or half of one on a core that is shared.
    assert time.thread_time() - used < 0.2


def test_a_process_that_is_forked_after_a_reduction_lives():
    """As a DataLoader's worker is; Python 3.11's hang where a thread just makes its state."""
    ended = []
    for _ in range(60):
        hvd.allreduce(torch.ones(1000) * 2, name="before")
        hvd.allreduce(torch.ones(10), name="after")
        child = os.fork()
        if child == 0:
            os._exit(3)
        deadline = time.monotonic() + 30
        while (status := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
            time.sleep(0)
        if status[0] == 0:
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)
        ended.append(os.waitstatus_to_exitcode(status[1]))
    assert ended == [3] * 60


def test_the_members_of_a_process_set_are_known(pending):
    if hvd.size() == 2:
        pytest.skip("two ranks have no smaller set in which one may wait")
    some = hvd.add_process_set([0, hvd.size() - 1])
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="of some", process_set=some)
        operations = pending.read()
        assert operations[0].process_set == some.process_set_id
        assert pending.members(operations) == {some.process_set_id: [0, hvd.size() - 1]}
    hvd.barrier()
    if hvd.rank() == hvd.size() - 1:
        handle = hvd.allreduce_async(torch.ones(1), name="of some", process_set=some)
    if some.included():
        hvd.synchronize(handle)
    hvd.barrier()
    assert hvd.remove_process_set(some)


def test_all_ranks_of_this_world_watch_one_another():
    members = hvd.allgather_object(watch._active._member._channel is not None)
    assert members == [True] * hvd.size()
    if hvd.rank() == 0:
        until(lambda: watch._active._hub.living() == list(range(hvd.size())))
    hvd.barrier()
