"""The Horovod member of ``comm``: finds Horovod, starts it, and carries host arrays over it.

A framework's name and its array conversions go in; an active ``HorovodCommunicator`` comes out.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from hvdsync.comm import clock, interfaces, runtime_threads, threads, world
from hvdsync.comm.communicator import Communicator, ReduceOp
from hvdsync.comm.comparison import installation, note
from hvdsync.comm.launch import LaunchInfo, claimed, detect
from hvdsync.errors import HorovodMissing, LaunchError

logger = logging.getLogger(__name__)

# The compiled part of Horovod for each framework, without the platform's suffix.
_EXTENSIONS = {"torch": "mpi_lib_v2", "tensorflow": "mpi_lib"}


def load(framework: str) -> ModuleType:
    """Import ``horovod.<framework>`` (``torch`` or ``tensorflow``).

    Raises :class:`HorovodMissing` with the command that mends it when Horovod or its extension
    for this framework is not there.
    """
    cure = f"run `python -m hvdsync build-horovod --{framework}` to build and install it"
    spec = importlib.util.find_spec("horovod")
    if spec is None or not spec.submodule_search_locations:
        raise HorovodMissing(f"hvdsync.{framework} needs Horovod, which is not installed; {cure}")
    # Looked up as a file: asking the import system would already run horovod.<framework>.
    folder = Path(spec.submodule_search_locations[0], framework)
    if not any(folder.glob(f"{_EXTENSIONS[framework]}.*")):
        raise HorovodMissing(
            f"the installed Horovod was built without {framework}, which hvdsync.{framework} "
            f"needs; {cure}"
        )
    return _import(framework)


@functools.cache
def _import(framework: str) -> ModuleType:
    # Kept: who puts a front door into sys.modules in place of Horovod means his own imports.
    return importlib.import_module(f"horovod.{framework}")


class HorovodCommunicator(Communicator):
    """Host arrays over Horovod's collectives of one framework.

    ``hvd`` is ``horovod.torch`` or ``horovod.tensorflow``; ``to_tensor`` and ``to_array`` convert
    between NumPy and that framework. Rank and size are asked at each use, since an elastic run
    changes them.
    """

    def __init__(
        self,
        hvd: ModuleType,
        to_tensor: Callable[[np.ndarray], Any],
        to_array: Callable[[Any], np.ndarray],
    ) -> None:
        self._hvd = hvd
        self._to_tensor = to_tensor
        self._to_array = to_array
        self._ops = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max}

    @property
    def rank(self) -> int:
        return self._hvd.rank()

    @property
    def size(self) -> int:
        return self._hvd.size()

    @property
    def local_rank(self) -> int:
        return self._hvd.local_rank()

    @property
    def local_size(self) -> int:
        return self._hvd.local_size()

    @property
    def cross_rank(self) -> int:
        return self._hvd.cross_rank()

    @property
    def cross_size(self) -> int:
        return self._hvd.cross_size()

    def _group(self, group: Any) -> Any:
        return self._hvd.global_process_set if group is None else group

    @clock.spend("stalled")
    def allreduce(
        self, array: np.ndarray, op: ReduceOp, name: str, group: Any = None
    ) -> np.ndarray:
        result = self._hvd.allreduce(
            self._to_tensor(array), op=self._ops[op], name=name, process_set=self._group(group)
        )
        return self._to_array(result)

    @clock.spend("stalled")
    def allgather(self, array: np.ndarray, name: str, group: Any = None) -> np.ndarray:
        result = self._hvd.allgather(
            self._to_tensor(array), name=name, process_set=self._group(group)
        )
        return self._to_array(result)

    @clock.spend("stalled")
    def broadcast(self, array: np.ndarray, root: int, name: str, group: Any = None) -> np.ndarray:
        result = self._hvd.broadcast(
            self._to_tensor(array), root, name=name, process_set=self._group(group)
        )
        return self._to_array(result)

    @clock.spend("stalled")
    def barrier(self, group: Any = None) -> None:
        if hasattr(self._hvd, "barrier"):
            self._hvd.barrier(process_set=self._group(group))
        else:  # Horovod for TensorFlow has none
            self.allreduce(np.zeros(1, np.float32), "sum", "hvdsync.barrier", group)


def _to_torch(array: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _to_tensorflow(array: np.ndarray) -> Any:
    import tensorflow as tf

    # On the host: what ranks say to one another is no work for an accelerator.
    with tf.device("CPU:0"):
        return tf.constant(array)


# The framework whose Horovod is up in this process.
_running: str | None = None

_TO_TENSOR = {"torch": _to_torch, "tensorflow": _to_tensorflow}


def start(framework: str, *args: Any, **kwargs: Any) -> None:
    """Initialise Horovod for ``torch`` or ``tensorflow`` and make it the active communicator.

    Further arguments are those of Horovod's ``init``.

    Raises :class:`LaunchError` when the launcher started more ranks than Horovod can see, as it
    happens when the launcher speaks MPI and Horovod was built without it; and when Horovod runs for
    another framework in this process.
    """
    global _running
    if _running not in (None, framework):
        raise LaunchError(
            f"hvdsync.{_running} is initialised in this process, and hvdsync.{framework} cannot be "
            "beside it: one process belongs to one world, over which verbs, checkpoints and guards "
            f"speak, and MPI ends for both with the first of them. Use hvdsync.{_running} for what "
            f"ranks say to one another, or call hvdsync.{_running}.shutdown() before"
        )
    hvd = load(framework)
    launch = detect()
    interfaces.settle()
    with _defaults(_settings(launch)), runtime_threads.noticed():
        hvd.init(*args, **kwargs)
    communicator = HorovodCommunicator(hvd, _TO_TENSOR[framework], lambda tensor: tensor.numpy())
    told = launch or claimed()
    if told is not None and not told.elastic:
        _refuse_a_world_that_differs(told, communicator, hvd)
    threads.cap_pools(importlib.import_module(framework), framework, communicator.local_size)
    world.activate(communicator)
    _running = framework
    # Compared later: TensorFlow's devices can be chosen after init, until its first operation.
    note("installed versions", installation(framework))
    logger.debug("rank %d of %d is up", communicator.rank, communicator.size)


def stop(framework: str) -> None:
    """Shut Horovod down; the process is a world of one afterwards."""
    global _running
    world.deactivate()
    _running = None
    runtime_threads.forget()
    load(framework).shutdown()


def _settings(launch: LaunchInfo | None) -> dict[str, str]:
    if launch is None:
        # With no launcher there is nobody to meet: Gloo starts alone, MPI would look for a daemon.
        return {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    if launch.launcher == "mpirun":
        # A rank that waits must leave its core to the others: where ranks outnumber cores, a
        # small all-reduce takes 20 times as long when waiting ranks spin.
        settings = {"OMPI_MCA_mpi_yield_when_idle": "1"}
        if launch.local_size == launch.size:
            # Within a host windows are shared memory; UCX would only complain on every rank that
            # it cannot offer more.
            settings["OMPI_MCA_osc"] = "^ucx"
        return settings
    return {}


@contextmanager
def _defaults(variables: dict[str, str]) -> Iterator[None]:
    """Environment variables for as long as Horovod starts, except those that are set already."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _refuse_a_world_that_differs(
    launch: LaunchInfo, communicator: HorovodCommunicator, hvd: ModuleType
) -> None:
    if communicator.size == launch.size:
        return
    found = communicator.size
    hvd.shutdown()
    raise LaunchError(
        f"{launch.launcher} started {launch.size} ranks (this is rank {launch.rank}), but Horovod "
        f"sees {found}: each would train alone. Start with `horovodrun -np {launch.size} ...`, or "
        "rebuild Horovod with MPI (`python -m hvdsync doctor` shows what it was built with)"
    )
