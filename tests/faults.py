"""Faults on purpose: ``at(step=3, rank=1).kills()`` goes into a launch, and strikes in that rank.

A test puts ``fault.environment()`` into the variables of a run. The script that runs there asks
``from_environment()`` and tells it of each step; what strikes, and where, is decided here alone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

_VARIABLE = "HVDSYNC_TEST_FAULT"


@dataclass(frozen=True)
class Fault:
    """One fault: what happens (``kind``), at which step (from 1) of which rank."""

    step: int
    rank: int
    kind: str
    value: Any = None

    def environment(self) -> dict[str, str]:
        """The variables that carry this fault into a launch."""
        return {_VARIABLE: json.dumps(asdict(self))}

    def strikes(self, step: int, rank: int, *kinds: str) -> bool:
        """Whether it is one of these kinds, and due."""
        return (step, rank) == (self.step, self.rank) and self.kind in kinds

    # What the script calls, each at its point of every step

    def before_step(self, step: int, rank: int) -> None:
        """Ends, stops or delays the process."""
        if self.strikes(step, rank, "raises"):
            raise RuntimeError(self.value)
        if self.strikes(step, rank, "exits"):
            sys.exit(self.value)
        if self.strikes(step, rank, "killed", "stopped"):
            number = signal.SIGKILL if self.kind == "killed" else signal.SIGSTOP
            os.kill(os.getpid(), number)
        if self.strikes(step, rank, "sleeps"):
            time.sleep(self.value)
        if self.strikes(step, rank, "spins"):
            while True:
                sum(range(1000))

    def in_batch(self, step: int, rank: int, batch: Any) -> Any:
        """The batch, a NumPy array, perhaps with a NaN in it."""
        if self.strikes(step, rank, "poisons"):
            batch = batch.copy()
            batch.reshape(-1)[0] = float("nan")
        return batch

    def reduces(self, step: int, rank: int, reduce: Any, value: Any) -> None:
        """Calls ``reduce(value)``, a collective of every step; or not, or with another shape."""
        if self.kind == "reduces_alone":
            if rank == self.rank:
                self._reduce_once(step, reduce, value)
            return
        if self.strikes(step, rank, "skips_reduction"):
            return
        if self.strikes(step, rank, "reduces_other_shape"):
            value = value.repeat(2)
        reduce(value)

    def _reduce_once(self, step: int, reduce: Any, value: Any) -> None:
        if step == self.step:
            reduce(value)

    def after_step(self, step: int, rank: int, variables: Any, read: Any, write: Any) -> None:
        """Flips the lowest bit of the last element of a float32 variable.

        ``variables()`` gives variables by name; the first whose name the pattern ``value`` fits is
        taken. ``read(variable)`` is a copy as a NumPy array, ``write(variable, array)`` sets it.
        """
        if not self.strikes(step, rank, "flips_bit"):
            return
        variable = next(v for n, v in variables().items() if re.search(self.value, n))
        array = read(variable)
        array.reshape(-1).view("uint32")[-1] ^= 1
        write(variable, array)


@dataclass(frozen=True)
class Place:
    """Where a fault is to strike; each method makes the fault."""

    step: int
    rank: int

    def _fault(self, kind: str, value: Any = None) -> Fault:
        return Fault(self.step, self.rank, kind, value)

    def raises(self, text: str = "out of cheese") -> Fault:
        """An exception in the user's code."""
        return self._fault("raises", text)

    def exits(self, code: int) -> Fault:
        """``sys.exit(code)``; with 0 a script that ends too early."""
        return self._fault("exits", code)

    def is_killed(self) -> Fault:
        """SIGKILL, as the kernel sends it when memory runs out."""
        return self._fault("killed")

    def is_stopped(self) -> Fault:
        """SIGSTOP: alive, and answering nothing."""
        return self._fault("stopped")

    def sleeps(self, seconds: float) -> Fault:
        """A pause in the user's code."""
        return self._fault("sleeps", seconds)

    def spins(self) -> Fault:
        """An endless loop in Python."""
        return self._fault("spins")

    def poisons(self) -> Fault:
        """A NaN in the batch."""
        return self._fault("poisons")

    def flips_bit(self, of: str) -> Fault:
        """One bit of the state whose name the pattern ``of`` fits, after the step."""
        return self._fault("flips_bit", of)

    def skips_reduction(self) -> Fault:
        """One collective less than the others."""
        return self._fault("skips_reduction")

    def reduces_other_shape(self) -> Fault:
        """Another shape under the same name."""
        return self._fault("reduces_other_shape")

    def reduces_alone(self) -> Fault:
        """A collective under ``if rank() == ...:``."""
        return self._fault("reduces_alone")


def at(step: int, rank: int) -> Place:
    """The place of a fault."""
    return Place(step, rank)


NO_FAULT = Fault(0, -1, "none")


def from_environment() -> Fault:
    """The fault of this launch, or one that never strikes."""
    text = os.environ.get(_VARIABLE)
    return Fault(**json.loads(text)) if text else NO_FAULT
