"""A function on its way to ranks and what comes back from each: a call in, an outcome out."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from hvdsync.errors import RankFailed, RunFailed, StalledRank


@dataclass(frozen=True)
class Failure:
    """What a rank raised. ``follows``: only because another rank had gone.

    ``pickled`` is the exception itself, None where it cannot be sent.
    """

    error: str
    trace: str
    follows: bool
    pickled: bytes | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """As seen from the function: the frames of who called it are left out."""
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        try:
            pickled = cloudpickle.dumps(error)
        except Exception:  # whatever the exception's attributes raise
            pickled = None
        return cls(
            "".join(traceback.format_exception_only(error)).strip(),
            "".join(traceback.format_exception(type(error), error, frames)).rstrip(),
            _follows(error),
            pickled,
        )

    def exception(self) -> BaseException | None:
        """The exception, where it can be made again on this side."""
        if self.pickled is None:
            return None
        try:
            made = cloudpickle.loads(self.pickled)
        except Exception:  # whatever its class raises, or a module that is not here
            return None
        return made if isinstance(made, BaseException) else None


@dataclass(frozen=True)
class Outcome:
    """The end of a call on one rank: ``pickled`` is what it returned, unless it failed."""

    rank: int
    pickled: bytes = b""
    failure: Failure | None = None
    ended: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Call:
    """A function with its arguments, pickled by value where ranks cannot import it.

    ``path`` is where this side imports from; folders of it that a rank has too are searched there
    after its own. ``environ`` is set before anything is unpickled.
    """

    pickled: bytes
    path: Sequence[str]
    environ: Mapping[str, str]

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        environ: Mapping[str, str],
    ) -> Call:
        """``fn(*args, **kwargs)``, to be called later and elsewhere."""
        pickled = cloudpickle.dumps((fn, tuple(args), dict(kwargs)))
        path = [os.path.abspath(folder) for folder in sys.path]
        return cls(pickled, path, dict(environ))

    def __call__(self) -> Any:
        os.environ.update(self.environ)
        sys.path += [f for f in self.path if f not in sys.path and os.path.exists(f)]
        fn, args, kwargs = cloudpickle.loads(self.pickled)
        return fn(*args, **kwargs)


def attempt(call: Callable[[], Any], rank: int) -> tuple[Outcome, BaseException | None]:
    """The call's outcome, beside the exception that it raised here."""
    try:
        result = call()
    except BaseException as error:
        return Outcome(rank, failure=Failure.of(error)), error
    try:
        return Outcome(rank, cloudpickle.dumps(result)), None
    except Exception as error:  # whatever the objects in it raise
        wrong = TypeError(
            f"rank {rank}: what the function returned cannot be sent back (found "
            f"{type(result).__name__}: {error}); return numbers, arrays, or a state dict"
        )
        return Outcome(rank, failure=Failure.of(wrong)), wrong


def results(outcomes: Sequence[Outcome]) -> list[Any]:
    """What each rank returned, in order of ranks; raises :class:`RunFailed` when one failed."""
    failed = sorted(
        (outcome for outcome in outcomes if outcome.failure is not None),
        key=lambda outcome: (outcome.failure is None or outcome.failure.follows, outcome.ended),
    )
    if failed:
        raise _error(failed, len(outcomes))
    ordered = sorted(outcomes, key=lambda outcome: outcome.rank)
    return [cloudpickle.loads(outcome.pickled) for outcome in ordered]


def raise_for(outcomes: Sequence[Outcome], size: int) -> None:
    """Raise :class:`RunFailed` if one of those that came back has failed of itself."""
    failed = [o for o in outcomes if o.failure is not None and not o.failure.follows]
    if failed:
        raise _error(sorted(failed, key=lambda outcome: outcome.ended), size)


def _error(failed: Sequence[Outcome], size: int) -> RunFailed:
    first = failed[0]
    assert first.failure is not None
    error = RunFailed(
        f"rank {first.rank} of {size} raised {first.failure.error}\n{first.failure.trace}"
    )
    error.rank = first.rank
    for outcome in failed:
        assert outcome.failure is not None
        if (exception := outcome.failure.exception()) is not None:
            error.exceptions[outcome.rank] = exception
    error.__cause__ = error.exceptions.get(first.rank)
    return error


def _follows(error: BaseException | None) -> bool:
    from hvdsync.guard.watch.exits import is_of_a_lost_rank

    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, StalledRank | RankFailed) or is_of_a_lost_rank(error):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
