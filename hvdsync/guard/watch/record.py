"""What one rank is at: its pending operations and its Python stacks, as values that travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hvdsync.guard.watch import stacks
from hvdsync.guard.watch.condition import Condition, rank_condition
from hvdsync.guard.watch.pending import Operation, Pending
from hvdsync.guard.watch.stacks import Frame

_MOST_OPERATIONS = 100


@dataclass(frozen=True)
class Record:
    """One rank at one moment.

    ``overdue``: it waits longer than it may. ``members`` are the ranks of process sets in
    ``operations`` other than the set of all. ``condition`` is a branch for some ranks only, around
    the place where this one waits.
    """

    rank: int
    overdue: bool
    operations: list[Operation]
    members: dict[int, list[int]] = field(default_factory=dict)
    stack: list[Frame] = field(default_factory=list)
    threads: dict[str, list[Frame]] = field(default_factory=dict)
    condition: Condition | None = None

    @property
    def compiling(self) -> bool:
        """Whether it imports, traces or compiles, and will come to its collectives later."""
        return not self.operations and stacks.is_compiling(self.stack)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, from which :meth:`from_dict` makes the record again."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
        """Undoes :meth:`as_dict`."""
        condition = values["condition"]
        return cls(
            rank=values["rank"],
            overdue=values["overdue"],
            operations=[Operation(**o) for o in values["operations"]],
            members={int(number): ranks for number, ranks in values["members"].items()},
            stack=[Frame(**f) for f in values["stack"]],
            threads={n: [Frame(**f) for f in stack] for n, stack in values["threads"].items()},
            condition=Condition(**condition) if condition else None,
        )


def take(rank: int, pending: Pending, overdue: bool, operations: Sequence[Operation]) -> Record:
    """The record of this rank, now."""
    stack = stacks.main_thread()
    return Record(
        rank=rank,
        overdue=overdue,
        operations=list(operations)[:_MOST_OPERATIONS],
        members=pending.members(operations),
        stack=stack,
        threads=stacks.other_threads(),
        condition=rank_condition(stack) if operations else None,
    )
