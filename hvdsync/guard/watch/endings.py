"""How ranks ended: raised, died or finished; and which of them the others ended because of."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

_MOST_LINES = 30


@dataclass(frozen=True)
class Ending:
    """One rank's end: ``error`` is its type and text, ``trace`` the last lines of its traceback."""

    rank: int
    how: Literal["raised", "died", "finished"]
    error: str = ""
    trace: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Ending:
        """The end of a rank that does not catch ``error``."""
        lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
        text = "".join(traceback.format_exception_only(error)).strip()
        if len(lines) > _MOST_LINES:
            lines = ["  ...", *lines[-_MOST_LINES:]]
        return cls(rank, "raised", text, "\n".join(lines))

    @property
    def text(self) -> str:
        """What happened, in one sentence without a full stop."""
        if self.how == "raised":
            # Of some errors, such as those of traced code, only the last line says what it is.
            lines = [line.strip() for line in self.error.splitlines() if line.strip()]
            more = lines[-1:] if lines[0].endswith(":") else []
            return f"rank {self.rank} raised {' '.join([lines[0], *more[: len(lines) - 1]])}"
        if self.how == "died":
            return (
                f"rank {self.rank} died without a word (killed, crashed or left by os._exit; the "
                "launcher's last lines name its exit code or signal)"
            )
        return f"rank {self.rank} finished its script, or called shutdown()"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, from which ``Ending(**values)`` makes it again."""
        return asdict(self)


def cause(endings: Iterable[Ending]) -> Ending | None:
    """The one that the others follow: the first failure, else the first that finished."""
    endings = list(endings)
    failures = [ending for ending in endings if ending.how != "finished"]
    return next(iter(failures or endings), None)
