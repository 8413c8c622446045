"""What the tests of all frameworks ask of several ranks: equal arrays, and a part of each batch."""

import time

from hvdsync.comm import launch, verbs


def assert_equal_arrays_on_all_ranks(arrays):
    """Bit for bit: shape and bytes of each NumPy array are those of every other rank."""
    mine = [(a.shape, a.tobytes()) for a in arrays]
    for rank, theirs in enumerate(verbs.allgather_object(mine)):
        assert len(mine) == len(theirs)
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert a == b, f"array {i} differs between this rank and rank {rank}"


def shard(*batch):
    """This rank's part of a global batch: every size-th sample."""
    return tuple(t[verbs.rank() :: verbs.size()] for t in batch)


def over_mpi():
    """Whether the launcher of these ranks speaks MPI."""
    started = launch.detect()
    return started is not None and started.launcher in ("mpirun", "mpiexec")


def wait_until(condition, seconds=60):
    """Return when the condition is true, which another rank is about to make it."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "another rank has not done what this one waits for"
        time.sleep(0.001)
