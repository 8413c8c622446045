"""Operations that this rank has submitted and that are not complete, oldest first.

Horovod's extension lists its own, built as ``python -m hvdsync build-horovod`` builds it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdsync.comm import in_flight

# A rank that has joined contributes to what the others do: it may wait as long as they train.
_JOIN = "join.noname"


@dataclass(frozen=True)
class Operation:
    """One collective that waits: its process set's number, and for how many seconds."""

    process_set: int
    seconds: float
    name: str

    @property
    def bounded(self) -> bool:
        """Whether the limit is for it."""
        return self.name != _JOIN


class Pending:
    """Reads the operations of one extension of Horovod (``hvd.mpi_ops._basics``)."""

    def __init__(self, basics: Any) -> None:
        self._basics = basics
        self._list = basics.MPI_LIB_CTYPES.horovod_pending_tensors

    @staticmethod
    def can_be_read(basics: Any) -> bool:
        """Whether this extension lists them; one that was built otherwise does not."""
        return hasattr(basics.MPI_LIB_CTYPES, "horovod_pending_tensors")

    def read(self) -> list[Operation]:
        """The operations at this moment. Nothing travels."""
        capacity = 4096
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            needed = self._list(buffer, capacity)
            if needed < capacity:
                own = [Operation(0, seconds, name) for name, seconds in in_flight.listed()]
                return by_age([*parse(buffer.value.decode(errors="replace")), *own])
            capacity = 2 * needed + 1

    def members(self, operations: Sequence[Operation]) -> dict[int, list[int]]:
        """The ranks of the process sets that operations run in; none for the set of all."""
        if all(operation.process_set == 0 for operation in operations):
            return {}
        try:
            sets: dict[int, list[int]] = self._basics._get_process_set_ids_and_ranks()
        except (ValueError, RuntimeError):  # Horovod shuts down, or a set is just being added
            return {}
        return {number: ranks for number, ranks in sets.items() if number != 0}


def parse(text: str) -> list[Operation]:
    """The operations in Horovod's lines: process set, milliseconds and name behind tabs."""
    operations = []
    for line in text.splitlines():
        process_set, milliseconds, name = line.split("\t", 2)
        operations.append(Operation(int(process_set), int(milliseconds) / 1000, name))
    return by_age(operations)


def by_age(operations: Sequence[Operation]) -> list[Operation]:
    """The oldest first."""
    return sorted(operations, key=lambda operation: -operation.seconds)
