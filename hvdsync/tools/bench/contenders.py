"""What takes part in ``bench step``: one training step each, and what it puts on the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

COMPUTE = "compute only"
HVDSYNC = "hvdsync"
COMMUNICATION = "hvdsync, communication only"
RAW = "raw Horovod"


@dataclass(frozen=True)
class Contender:
    """``step`` takes one; ``traffic`` gives bytes and collectives of this rank so far."""

    step: Callable[[], None]
    traffic: Callable[[], tuple[int, int]] | None = None

    def of_one_step(self) -> tuple[float, float]:
        """Bytes and collectives of one more step. Collective."""
        assert self.traffic is not None
        before = self.traffic()
        self.step()
        sent, collectives = self.traffic()
        return sent - before[0], collectives - before[1]
