"""Memory of all ranks that each adds to and reads while its owner computes: MPI's windows.

NumPy arrays go in and out, one-sided and with passive targets, so no rank waits for another.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdsync.comm import failures, launch, world
from hvdsync.errors import LaunchError

# Elements of one operation. MPI locks what it adds to: others get in between two pieces.
_PIECE = 1 << 16

_in_use = False


def connect() -> Any:
    """An mpi4py communicator of the ranks of this world, in their order; collective.

    Raises :class:`LaunchError` on every rank where they were not started over MPI, and where
    mpi4py is missing or belongs to another MPI.
    """
    global _in_use
    comm = world.current()
    here = f"rank {comm.rank} of {comm.size}"
    how = (
        f"start it with `horovodrun --mpi -np {comm.size} ...` or `mpirun -np {comm.size} ...` "
        "(`python -m hvdsync doctor` says whether Horovod was built with MPI)"
    )
    started = launch.detect()
    if started is None or started.launcher == "horovodrun":
        # Asked before MPI is: it would start as a world of one in each process.
        raise LaunchError(
            f"{here}: MPI's one-sided windows need a launch over MPI, found "
            f"{'none' if started is None else 'horovodrun over Gloo'}; {how}"
        )
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{here}: MPI's one-sided windows need mpi4py, which does not load ({error}); install "
            "it with `pip install 'hvdsync[mpi]'`"
        ) from error
    if MPI.COMM_WORLD.Get_size() != comm.size:
        raise LaunchError(
            f"{here}: {started.launcher} started the ranks, but mpi4py sees "
            f"{MPI.COMM_WORLD.Get_size()} of them; {how}, with the MPI that mpi4py was built for"
        )
    _in_use = True
    return MPI.COMM_WORLD.Split(0, comm.rank)


def before_leaving() -> None:
    """Wait, where windows were made, until all ranks are here: then nobody uses them any more.

    Collective. Who leaves MPI takes it from all ranks at once, and their windows with it.
    """
    global _in_use
    if _in_use:
        _in_use = False
        world.current().barrier()


class SharedVector:
    """A flat array of float32 or float64 that is cut into a piece for each rank to hold.

    Every method but the last is one rank's own. Additions are atomic for each element, and none is
    lost; who reads meanwhile may see some elements before and others after an addition.
    ``connection`` is that of :func:`connect`. On the wire: ``length`` elements for each call.
    """

    def __init__(self, connection: Any, length: int, dtype: Any) -> None:
        from mpi4py import MPI

        self._mpi, self._connection = MPI, connection
        size, self._rank = connection.Get_size(), connection.Get_rank()
        bounds = [length * rank // size for rank in range(size + 1)]
        self._mine = slice(bounds[self._rank], bounds[self._rank + 1])
        # From this rank's own piece on, so that ranks in step are not all at the same one.
        self._places = [
            (owner, first - bounds[owner], slice(first, min(first + _PIECE, bounds[owner + 1])))
            for owner in [(self._rank + i) % size for i in range(size)]
            for first in range(bounds[owner], bounds[owner + 1], _PIECE)
        ]
        dtype = np.dtype(dtype)
        held = self._mine.stop - self._mine.start
        self._window = MPI.Win.Allocate(held * dtype.itemsize, dtype.itemsize, comm=connection)
        self._held = _memory(self._window, dtype)
        self._window.Lock_all()

    def add(self, difference: np.ndarray, before: np.ndarray) -> None:
        """Add; ``before`` becomes what the array was right before that."""
        self._exchange(difference, before, self._mpi.SUM)

    def read(self, values: np.ndarray) -> None:
        """``values`` become those of the array."""
        # MPI does not look at what is given with this operation, but for its length.
        self._exchange(values, values, self._mpi.NO_OP)

    def _exchange(self, given: np.ndarray, taken: np.ndarray, op: Any) -> None:
        _require_mpi(self._mpi)
        for owner, first, place in self._places:
            self._window.Get_accumulate(given[place], taken[place], owner, first, op=op)
        self._window.Flush_all()

    def become(self, values: np.ndarray, root: int) -> None:
        """Become ``values`` of the rank ``root``, and so do those of every rank; collective.

        No other rank may use the array meanwhile: a barrier belongs before and after.
        """
        self._connection.Bcast(values, root)
        self._held[:] = values[self._mine]
        self._window.Sync()


class SharedCounters:
    """A whole number of each rank, which it sets and all read."""

    def __init__(self, connection: Any) -> None:
        from mpi4py import MPI

        self._mpi, self._rank = MPI, connection.Get_rank()
        self._window = MPI.Win.Allocate(8, 8, comm=connection)
        _memory(self._window, np.int64)[:] = 0
        self._window.Lock_all()
        connection.Barrier()

    def set(self, value: int) -> None:
        """Set this rank's own."""
        _require_mpi(self._mpi)
        self._window.Accumulate(np.array([value], np.int64), self._rank, op=self._mpi.REPLACE)
        self._window.Flush(self._rank)

    def read(self, rank: int) -> int:
        """That of ``rank``."""
        _require_mpi(self._mpi)
        found = np.empty(1, np.int64)
        self._window.Fetch_and_op(found, found, rank, op=self._mpi.NO_OP)
        self._window.Flush(rank)
        return int(found[0])


def _memory(window: Any, dtype: Any) -> np.ndarray:
    """This rank's own part of a window."""
    return np.frombuffer(window, dtype)


def _require_mpi(mpi: Any) -> None:
    """Raise what is known of the reason where another rank's end has taken MPI away."""
    if mpi.Is_finalized():
        with failures.explained():
            raise RuntimeError("Horovod has been shut down, and MPI with it")
