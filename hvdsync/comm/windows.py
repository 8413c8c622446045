"""Memory of all ranks that each adds to and reads while its owner computes: MPI's windows.

NumPy arrays go in and out, one-sided and with passive targets, so no rank waits for another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdsync.comm import failures, launch, world
from hvdsync.errors import LaunchError

# Elements of one operation. MPI locks what it adds to: others get in between two pieces.
_PIECE = 1 << 16

_in_use = False

# Held while this rank adds or reads: MPI, which another rank's end takes from all, waits for that.
_using = threading.Lock()
_is_over = False


def require_launch() -> None:
    """Raise :class:`LaunchError` where the ranks of this world were not started over MPI.

    MPI itself is not asked, which would start as a world of one in each process; nothing travels.
    """
    started = launch.detect()
    if started is None or started.launcher == "horovodrun":
        found = "no launcher" if started is None else "horovodrun over Gloo"
        raise LaunchError(
            f"{_here()}: parameters are shared through MPI's one-sided windows, which need a "
            f"launch over MPI; found {found}. {_how_to_start()}"
        )


def _here() -> str:
    return f"rank {world.current().rank} of {world.current().size}"


def _how_to_start() -> str:
    size = world.current().size
    return (
        f"Start with `horovodrun --mpi -np {size} ...` or `mpirun -np {size} ...`; `python -m "
        "hvdsync doctor` says whether Horovod was built with MPI"
    )


def connect() -> Any:
    """An mpi4py communicator of the ranks of this world, in their order; collective.

    Raises :class:`LaunchError` on every rank where they were not started over MPI, and where
    mpi4py is missing or belongs to another MPI.
    """
    global _in_use
    require_launch()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{_here()}: MPI's one-sided windows need mpi4py, which does not load ({error}); "
            "install it with `pip install 'hvdsync[mpi]'`"
        ) from error
    if MPI.COMM_WORLD.Get_size() != world.current().size:
        raise LaunchError(
            f"{_here()}: mpi4py sees a world of {MPI.COMM_WORLD.Get_size()}, and was perhaps built "
            f"for another MPI than Horovod. {_how_to_start()}"
        )
    if not _in_use:
        _in_use = True
        _hear_of_the_end(MPI)
    return MPI.COMM_WORLD.Split(0, world.current().rank)


def _hear_of_the_end(mpi: Any) -> None:
    """Have MPI wait, before it ends, for what this rank does with a window, and let none follow.

    Horovod ends MPI from a thread of its own, as soon as any rank asks for it; an operation that it
    cuts short ends the process. The first thing that MPI's end does is to let go of what its
    communicator of one carries (MPI 4.1, "Allowing User Functions at MPI Finalization").
    """

    def end(*_: Any) -> None:
        global _is_over
        with _using:
            _is_over = True

    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=end), None)


@contextmanager
def _use() -> Iterator[None]:
    """Context in which MPI stays; raises what is known of the reason where it has been taken."""
    with _using:
        if _is_over:
            with failures.explained():
                raise RuntimeError("Horovod has been shut down, and MPI with it")
        yield


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

    Adding and reading are one rank's own. Additions are atomic for each element, and none is
    lost; who reads meanwhile may see some elements before and others after an addition.
    ``connection`` is that of :func:`connect`. On the wire: ``length`` elements there and back.
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
        with _use():
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

    def close(self) -> None:
        """Give the memory back; collective."""
        self._window.Unlock_all()
        self._window.Free()


class SharedCounters:
    """Whole numbers of each rank, ``count`` of them and 0 at first, which any rank sets and reads.

    Making them is collective; the methods are one rank's own.
    """

    def __init__(self, connection: Any, count: int) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._window = MPI.Win.Allocate(8 * count, 8, comm=connection)
        _memory(self._window, np.int64)[:] = 0
        self._window.Lock_all()
        connection.Barrier()

    def set(self, rank: int, which: int, value: int) -> None:
        """Set one of ``rank``'s numbers."""
        given = np.array([value], np.int64)
        with _use():
            self._window.Accumulate(given, rank, which, op=self._mpi.REPLACE)
            self._window.Flush(rank)

    def read(self, rank: int, which: int) -> int:
        """One of ``rank``'s numbers."""
        found = np.empty(1, np.int64)
        with _use():
            self._window.Fetch_and_op(found, found, rank, which, op=self._mpi.NO_OP)
            self._window.Flush(rank)
        return int(found[0])

    def close(self) -> None:
        """Give the memory back; collective."""
        self._window.Unlock_all()
        self._window.Free()


def _memory(window: Any, dtype: Any) -> np.ndarray:
    """This rank's own part of a window."""
    return np.frombuffer(window, dtype)
