"""The interface through which rooms talk between ranks, and its member for a single process.

NumPy arrays flow in and out; a member moves them with whatever runtime it stands for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import numpy as np

ReduceOp = Literal["sum", "min", "max"]


class Communicator(ABC):
    """Collective operations on host arrays among the ranks of one run.

    Every method is collective: each rank calls it, in the same order, with the same ``name``.
    ``group`` restricts an operation to a subset of ranks, in the runtime's own terms (for Horovod
    a ``ProcessSet``); ``None`` means all ranks.
    """

    @property
    @abstractmethod
    def rank(self) -> int:
        """Index of this process among all, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of processes in the run."""

    @property
    @abstractmethod
    def local_rank(self) -> int:
        """Index of this process among those of its host."""

    @property
    @abstractmethod
    def local_size(self) -> int:
        """Number of processes on this host."""

    @property
    @abstractmethod
    def cross_rank(self) -> int:
        """Index of this host among those that have a process of this local rank."""

    @property
    @abstractmethod
    def cross_size(self) -> int:
        """Number of hosts that have a process of this local rank."""

    @abstractmethod
    def allreduce(
        self, array: np.ndarray, op: ReduceOp, name: str, group: Any = None
    ) -> np.ndarray:
        """Element-wise reduction over ranks; same shape and dtype everywhere, result everywhere."""

    @abstractmethod
    def allgather(self, array: np.ndarray, name: str, group: Any = None) -> np.ndarray:
        """Concatenation over ranks along axis 0, in rank order; lengths along it may differ."""

    @abstractmethod
    def broadcast(self, array: np.ndarray, root: int, name: str, group: Any = None) -> np.ndarray:
        """The array of rank ``root``; other ranks give one of the same shape and dtype."""

    @abstractmethod
    def barrier(self, group: Any = None) -> None:
        """Return once every rank has called it."""


class SingleProcess(Communicator):
    """The world of one process: every collective gives back what it was given."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    cross_rank = 0
    cross_size = 1

    def allreduce(
        self, array: np.ndarray, op: ReduceOp, name: str, group: Any = None
    ) -> np.ndarray:
        return array.copy()

    def allgather(self, array: np.ndarray, name: str, group: Any = None) -> np.ndarray:
        return array.copy()

    def broadcast(self, array: np.ndarray, root: int, name: str, group: Any = None) -> np.ndarray:
        return array.copy()

    def barrier(self, group: Any = None) -> None:
        return None
