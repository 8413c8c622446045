"""What ``hvdsync.run`` may be asked for, and where: options in, refusals with the reason out."""

from __future__ import annotations

from dataclasses import dataclass

_WHERE = {
    "local": {"over", "start_timeout_seconds"},
    "spark": {"start_timeout_seconds", "min_np", "max_np"},
    "ray": {"start_timeout_seconds", "min_np", "max_np", "cpus_per_rank", "gpus_per_rank"},
}
_INSTEAD = {
    "over": "ranks on Spark and Ray talk over Gloo",
    "min_np": "an elastic job of one machine has a host discovery script: start it with "
    "`horovodrun --min-np ... --host-discovery-script ...`",
    "cpus_per_rank": "Spark has spark.task.cpus for it, and ranks of this machine share its cores",
    "gpus_per_rank": "Spark has spark.task.resource.gpu.amount for it, and ranks of this machine "
    "take the GPU of their local rank",
}
_INSTEAD["max_np"] = _INSTEAD["min_np"]


@dataclass(frozen=True)
class Options:
    """As :func:`hvdsync.run` has them; None is not given."""

    np: int
    over: str | None = None
    start_timeout_seconds: int | None = None
    min_np: int | None = None
    max_np: int | None = None
    cpus_per_rank: int | None = None
    gpus_per_rank: int | None = None

    @property
    def elastic(self) -> bool:
        """Whether ranks may come and go."""
        return self.min_np is not None or self.max_np is not None

    def check(self, on: str) -> None:
        """Raise ``ValueError`` for what there is not with ``on``."""
        if on not in _WHERE:
            raise ValueError(f"hvdsync.run: on={on!r}; expected one of {', '.join(_WHERE)}")
        if self.np < 1:
            raise ValueError(f"hvdsync.run: np={self.np}; expected 1 or more")
        if self.over not in (None, "gloo", "mpi"):
            raise ValueError(f"hvdsync.run: over={self.over!r}; expected gloo or mpi")
        for name, instead in _INSTEAD.items():
            if getattr(self, name) is not None and name not in _WHERE[on]:
                raise ValueError(f"hvdsync.run: {name} is not for on={on!r}; {instead}")
        low, high = self.min_np or self.np, self.max_np or self.np
        if not 1 <= low <= self.np <= high:
            raise ValueError(
                f"hvdsync.run: min_np={low}, np={self.np}, max_np={high}; expected them to rise"
            )
