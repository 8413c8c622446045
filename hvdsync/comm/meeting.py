"""Where the ranks of a process group meet: a launch or explicit numbers in, a place and store out.

Rank 0 keeps the store; how the others learn its address depends on who started them.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from hvdsync.comm import launcher_store
from hvdsync.comm.addresses import LOOPBACK, own_addresses
from hvdsync.comm.launch import detect
from hvdsync.errors import LaunchError

# All ranks start and stop alike, so that equal numbers are the same world.
_worlds = itertools.count()
_TRY_SECONDS = 3.0


@dataclass(frozen=True)
class Place:
    """Which rank this process is, and where rank 0 is if that is known from the beginning.

    ``local`` is (local rank, local size) where a launcher tells them.
    """

    rank: int
    size: int
    started_by: str
    address: str | None = None
    port: int | None = None
    local: tuple[int, int] | None = None

    @property
    def one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local is not None and self.local[1] == self.size


def find_place(
    rank: int | None = None,
    size: int | None = None,
    master_address: str | None = None,
    master_port: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> Place:
    """The place that the arguments say, all of them; else the launcher; else that of one process.

    ``environ`` defaults to the process's own. With no launcher its RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT count if all are there. Raises :class:`LaunchError` for arguments that are
    incomplete or out of range, and for elastic launches.
    """
    environ = os.environ if environ is None else environ
    asked = {
        "rank": rank,
        "size": size,
        "master_address": master_address,
        "master_port": master_port,
    }
    if any(value is not None for value in asked.values()):
        return _explicit(asked)
    launch = detect(environ)
    if launch is None:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not all(environ.get(name) for name in names):
            return Place(0, 1, "hand")
        values = [environ[name] for name in names]
        return Place(int(values[0]), int(values[1]), "environment", values[2], int(values[3]))
    if launch.elastic:
        raise LaunchError(
            f"{launch.launcher} started an elastic job, in which ranks come and go; a process "
            "group has a fixed number of them. Start with `horovodrun -np N`, or use "
            "init(engine='horovod')"
        )
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    # horovodrun passes on whatever its own environment holds, and has a store of its own.
    known = bool(address and port) and launch.launcher != "horovodrun"
    return Place(
        launch.rank,
        launch.size,
        launch.launcher,
        address if known else None,
        int(port) if known and port else None,
        (launch.local_rank, launch.local_size),
    )


def _explicit(asked: Mapping[str, Any]) -> Place:
    missing = [name for name, value in asked.items() if value is None]
    if asked["size"] == 1:
        missing = [name for name in missing if name == "rank"]
    if missing:
        raise LaunchError(
            f"init(engine='ddp') was given {_list(k for k in asked if asked[k] is not None)} but "
            f"not {_list(missing)}; give all of them, the same master on every rank, or none "
            "under a launcher"
        )
    rank, size = int(asked["rank"]), int(asked["size"])
    if not 0 <= rank < size:
        raise LaunchError(
            f"init(engine='ddp'): rank is {rank} and size is {size}; expected 0 <= rank < size"
        )
    port = asked["master_port"]
    return Place(rank, size, "arguments", asked["master_address"], port and int(port))


def _list(names: Any) -> str:
    return ", ".join(f"{name}=" for name in names)


def open_store(torch: Any, place: Place, seconds: float) -> Any:
    """The store in which the ranks of ``place`` find one another; collective.

    Raises :class:`LaunchError` when rank 0 cannot be found or reached within ``seconds``.
    """
    dist = torch.distributed
    if place.size == 1:
        return dist.HashStore()
    # A store that outlives a world must not give its addresses to the next one.
    world = f"hvdsync.ddp/world-{next(_worlds)}"
    return dist.PrefixStore(world, _open(dist, place, world, seconds))


def _open(dist: Any, place: Place, world: str, seconds: float) -> Any:
    limit = timedelta(seconds=seconds)
    try:
        if place.started_by == "torchrun":
            # Its agent may be who keeps the store: PyTorch's own way in knows.
            return next(dist.rendezvous("env://", place.rank, place.size, timeout=limit))[0]
        if place.address is not None:
            return dist.TCPStore(place.address, place.port, place.size, place.rank == 0, limit)
        if place.rank == 0:
            listener = socket.create_server((LOOPBACK if place.one_host else "0.0.0.0", 0))
            port = listener.getsockname()[1]
            store = dist.TCPStore(
                LOOPBACK,
                port,
                place.size,
                True,
                limit,
                wait_for_workers=False,
                # The store's from now on. A port that is asked for by number may be taken by then.
                master_listen_fd=listener.detach(),
            )
            addresses = own_addresses(one_host=place.one_host)
            _tell(place, {"addresses": addresses, "port": port}, world, seconds)
            return store
        heard = _tell(place, None, world, seconds)
        address = _reachable(heard["addresses"], heard["port"])
        return dist.TCPStore(
            address, heard["port"], place.size, False, limit, wait_for_workers=False
        )
    except (RuntimeError, OSError) as error:  # DistError is the first
        where = f" at {place.address}:{place.port}" if place.address else ""
        raise LaunchError(
            f"rank {place.rank} of {place.size}: the ranks did not meet{where} "
            f"({_first_line(error)}); look whether all {place.size} were started, and whether "
            "rank 0's host can be reached from here"
        ) from error


def _reachable(addresses: list[str], port: int) -> str:
    if len(addresses) == 1:
        return addresses[0]
    for address in addresses:
        try:
            socket.create_connection((address, port), timeout=_TRY_SECONDS).close()
        except OSError:
            continue
        return address
    raise OSError(f"none of rank 0's addresses {', '.join(addresses)} answers on port {port}")


def _tell(place: Place, said: dict[str, Any] | None, world: str, seconds: float) -> Any:
    """What rank 0 said, on every rank, through what the launcher offers."""
    if place.started_by == "horovodrun":
        payload = json.dumps(said).encode()
        heard = launcher_store.pass_on(os.environ, place.rank, world, payload, seconds=seconds)
        if heard is None:
            raise OSError("horovodrun's store gave no answer")
        return json.loads(heard)
    if place.started_by in ("mpirun", "mpiexec"):
        return _tell_over_mpi(place, said)
    raise LaunchError(
        f"{place.started_by} started rank {place.rank} of {place.size}, but says nothing of rank "
        "0's address; export MASTER_ADDR (a host that all ranks reach, that of rank 0) and "
        "MASTER_PORT (a free port there)"
    )


def _tell_over_mpi(place: Place, said: dict[str, Any] | None) -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{place.started_by} started rank {place.rank} of {place.size}; to tell ranks where "
            f"rank 0 is mpi4py is needed, which does not load ({error}). Install it with `pip "
            "install 'hvdsync[mpi]'`, or export MASTER_ADDR and MASTER_PORT"
        ) from error
    comm = MPI.COMM_WORLD
    if comm.Get_size() != place.size:
        raise LaunchError(
            f"{place.started_by} started {place.size} ranks, but mpi4py sees {comm.Get_size()}: "
            "it was built for another MPI. Export MASTER_ADDR and MASTER_PORT instead"
        )
    return comm.bcast(said, root=0)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
