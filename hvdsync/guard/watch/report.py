"""The report on a wait that cannot end: records of ranks and how others ended in, its text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdsync.comm.comparison import listed
from hvdsync.guard.watch import endings
from hvdsync.guard.watch.endings import Ending
from hvdsync.guard.watch.limit import VARIABLE
from hvdsync.guard.watch.record import Record
from hvdsync.guard.watch.stacks import formatted, users_frame

_MOST_TENSORS = 10


@dataclass(frozen=True)
class Report:
    """``summary`` is one line; ``text`` all of it, beginning with that line."""

    failed: bool
    summary: str
    text: str


@dataclass(frozen=True)
class Situation:
    """All that is known of the ranks at one moment.

    ``silent`` says of ranks that gave no record why they may not (a process that is stopped, ...).
    """

    size: int
    limit: float
    records: Mapping[int, Record]
    endings: Sequence[Ending] = ()
    silent: Mapping[int, str] | None = None

    def waiting(self) -> list[tuple[str, float, list[int], list[int]]]:
        """(tensor, seconds, ranks that have come, ranks that have not) of what waits.

        First what only some ranks call, by a condition on the rank, then the longest.
        """
        came: dict[tuple[int, str], dict[int, float]] = {}
        members: dict[int, list[int]] = {0: list(range(self.size))}
        for rank, record in self.records.items():
            members.update(record.members)
            for operation in record.operations:
                key = (operation.process_set, operation.name)
                came.setdefault(key, {})[rank] = operation.seconds
        found = []
        for (number, name), ranks in came.items():
            absent = sorted(set(members.get(number, members[0])) - ranks.keys())
            found.append((name, max(ranks.values()), sorted(ranks), absent))
        some = {rank for rank, record in self.records.items() if record.condition is not None}
        return sorted(found, key=lambda entry: (some.isdisjoint(entry[2]), -entry[1]))

    def absent(self) -> list[int]:
        """The ranks that some operation waits for."""
        return sorted({rank for *_, absent in self.waiting() for rank in absent})


def compose(situation: Situation) -> Report:
    """The report: the stacks, what waits for whom, what each rank is at, and what to do.

    What is read first stands last: that is where logs are looked at, and what launchers repeat.
    """
    waiting = situation.waiting()
    cause = endings.cause(situation.endings)
    summary = _summary(situation, cause)
    lines = [summary, *_stacks(situation), "What waits:"]
    for name, seconds, came, absent in waiting[:_MOST_TENSORS]:
        missing = f"not come: {listed(absent)}" if absent else "all have come, but it does not end"
        lines.append(f"  {name}: for {seconds:.0f} s; come: {listed(came)}; {missing}")
    if len(waiting) > _MOST_TENSORS:
        lines.append(f"  and {len(waiting) - _MOST_TENSORS} more")
    lines.append("Where the ranks are:")
    lines += [f"  {_whereabouts(situation, rank)}" for rank in range(situation.size)]
    lines += _conditions(situation)
    lines += [_advice(situation, cause)]
    return Report(cause is not None, summary, "\n".join(lines))


def _summary(situation: Situation, cause: Ending | None) -> str:
    waiting = situation.waiting()
    what = f"collective {waiting[0][0]!r}" if waiting else "a collective"
    if cause is not None:
        return f"{cause.text}, while other ranks wait for it in {what}"
    absent = waiting[0][3] if waiting else []
    seconds = waiting[0][1] if waiting else situation.limit
    if absent:
        elsewhere = [entry for entry in waiting[1:] if set(absent) <= set(entry[2])]
        meanwhile = f", which waits in {elsewhere[0][0]!r} meanwhile" if elsewhere else ""
        return (
            f"{what} has waited {seconds:.0f} s for {listed(absent)}{meanwhile} "
            f"(limit {situation.limit:g} s)"
        )
    return f"{what} has not ended for {seconds:.0f} s (limit {situation.limit:g} s)"


def _whereabouts(situation: Situation, rank: int) -> str:
    ended = {ending.rank: ending for ending in situation.endings}
    if rank in ended:
        return ended[rank].text
    record = situation.records.get(rank)
    if record is None:
        why = (situation.silent or {}).get(rank, "")
        return f"rank {rank} does not answer{': ' if why else ''}{why}"
    frame = users_frame(record.stack)
    place = f"{frame.place}: {frame.code}" if frame else "a place without a Python stack"
    if record.operations:
        others = len(record.operations) - 1
        more = f" and {others} more" if others else ""
        return f"rank {rank} waits for {record.operations[0].name}{more} at {place}"
    if record.compiling:
        return f"rank {rank} lives, and imports, traces or compiles at {place}"
    return f"rank {rank} lives, and is in no collective, but at {place}"


def _conditions(situation: Situation) -> list[str]:
    lines = []
    for rank, record in sorted(situation.records.items()):
        if record.condition is not None:
            condition = record.condition
            lines += [
                f"A collective under a condition on the rank: rank {rank} waits inside",
                f"  {condition.file}:{condition.line}: {condition.text}",
                "  Ranks that go another way there never come to it; every rank must call it.",
            ]
    return lines


def _stacks(situation: Situation) -> list[str]:
    by_stack: dict[str, list[int]] = {}
    for rank, record in sorted(situation.records.items()):
        by_stack.setdefault(formatted(record.stack), []).append(rank)
    lines = []
    for stack, ranks in by_stack.items():
        lines += [f"Stack of {listed(ranks)}:", stack]
    for rank, record in sorted(situation.records.items()):
        for name, frames in record.threads.items():
            lines += [f"Stack of thread {name} of rank {rank}:", formatted(frames)]
    for ending in situation.endings:
        if ending.trace:
            lines += [f"Traceback of rank {ending.rank}:", ending.trace]
    return lines


def _advice(situation: Situation, cause: Ending | None) -> str:
    if cause is not None and cause.how != "finished":
        return f"What to do: look for the reason on rank {cause.rank}; the others only follow"
    if cause is not None:
        return (
            "What to do: let every rank take part in the same number of collectives (equal numbers "
            "of steps, or join())"
        )
    return (
        "What to do: let every rank enter the same collectives in the same order. Where one needs "
        f"more than {situation.limit:g} s before it comes, raise the limit by init(wait_limit=...) "
        f"or the variable {VARIABLE}"
    )
