"""How all ranks learn where rank 0 listens: what it says goes in on rank 0, and out on every rank.

Horovod's own operations cannot carry it: in TensorFlow they would start its runtime within init.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
from typing import Any

from hvdsync.comm import launcher_store

_SECONDS = 20.0
_MOST_BYTES = 4096
_SCOPE = "hvdsync.watch"
# All ranks start and stop alike, so that equal numbers are the same world.
_worlds = itertools.count()


def tell_all(basics: Any, rank: int, size: int, said: dict[str, Any] | None) -> Any:
    """What rank 0 said, on every rank; None where there is no way to learn it.

    Collective. Over Gloo through the launcher's store, over MPI by one broadcast of 4 KiB.
    """
    world = next(_worlds)
    payload = json.dumps(said).encode()
    if basics.mpi_enabled():
        received = _broadcast_over_mpi(basics, rank, size, payload)
    else:
        key = f"{_SCOPE}/world-{world}"
        received = launcher_store.pass_on(os.environ, rank, key, payload, seconds=_SECONDS)
    return None if received is None else json.loads(received)


def _broadcast_over_mpi(basics: Any, rank: int, size: int, payload: bytes) -> bytes | None:
    """The library that Horovod is linked to is asked, since any other may be another MPI."""
    library = basics.MPI_LIB_CTYPES
    try:
        handles = _handles(library)
        processes = ctypes.c_int()
        library.MPI_Comm_size(handles[0], ctypes.byref(processes))
        # A world that is a part of MPI's own has ranks of its own.
        if processes.value != size or not basics.mpi_threads_supported():
            return None
        buffer = ctypes.create_string_buffer(payload if rank == 0 else b"", _MOST_BYTES)
        failed = library.MPI_Bcast(buffer, _MOST_BYTES, handles[1], 0, handles[0])
    except (AttributeError, ValueError):  # no such function, or no such handle
        return None
    return None if failed else buffer.value


def _handles(library: Any) -> tuple[Any, Any]:
    """MPI_COMM_WORLD and MPI_BYTE: addresses in Open MPI, numbers in MPICH and Intel MPI."""
    try:
        return tuple(  # type: ignore[return-value]
            ctypes.c_void_p(ctypes.addressof(ctypes.c_byte.in_dll(library, name)))
            for name in ("ompi_mpi_comm_world", "ompi_mpi_byte")
        )
    except ValueError:
        return ctypes.c_int(0x44000000), ctypes.c_int(0x4C00010D)
