"""``CorruptionProbe``: two ranks compute the same batches now and then, and all hear who is wrong.

How a gradient is computed, and again from the same state, comes in from a front door.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import xxhash

from hvdsync.comm import verbs
from hvdsync.comm.comparison import listed
from hvdsync.errors import SilentCorruption
from hvdsync.guard import replicas
from hvdsync.guard.fingerprints import Entry
from hvdsync.guard.guard import StepCount

logger = logging.getLogger(__name__)

# A bias before a normalisation has a gradient of zero, but for rounding of what cancels out.
_LEAST_SHARE = 0.01

# Name and value of each gradient; one that does not exist is empty.
Gradients = Sequence[tuple[str, np.ndarray]]


class Backend(Protocol):
    """What the probe needs of a framework, for one model."""

    def portable(self, batch: Any) -> Any:
        """A batch that can be pickled, and given to :meth:`gradients` on another rank."""

    def state(self) -> Any:
        """What a gradient depends on besides batch and parameters, such as statistics; portable."""

    def parameters(self) -> list[Entry]:
        """The parameters, which must be equal on all ranks."""

    def put(self, state: Any) -> None:
        """Give the model a :meth:`state`."""

    def gradients(self, batch: Any, seed: int) -> Gradients:
        """The gradients of the loss of a portable batch, computed from the model's state.

        Noise is drawn from ``seed``. Parameters, their ``.grad`` and the random streams stay as
        they were.
        """


@dataclass(frozen=True)
class Finding:
    """What a probe found: ``ranks`` are known to be wrong; none where it cannot be told whose."""

    ranks: tuple[int, ...]
    text: str


class CorruptionProbe:
    """Has a micro-batch computed on another rank, every so many steps, and names who is wrong.

    Two ranks, others each time, exchange their batches. Each computes the gradients of both twice.
    One that does not come to its own results again is wrong; when both do, and differ, a third rank
    decides between them. With two ranks it can then only be said that they differ, and one rank
    alone is told when it does not reproduce itself.

    Arguments:
        loss: ``loss(model, batch)`` gives the scalar loss of a batch, which is differentiated.
        every: probe at every so many calls of :meth:`check`. A probe costs the two ranks four
            forward and backward passes each, while the others wait.
        tolerance: how far two results for a gradient may be apart, relative to its greatest
            element, or to a hundredth of that of all gradients where this is more: some gradients
            are rounding and nothing else. Sums in another order differ by about 1e-6 in float32;
            give more for numbers of 16 bits. What is smaller is not found.
        on_corruption: ``"raise"`` raises ``SilentCorruption`` on every rank; with ``"warn"`` rank 0
            logs it.

    Parameters must be equal on all ranks, which is checked before. Buffers or other state of the
    model, and the noise of dropout, are those of the batch's rank in all computations, and are put
    back after. A loss that depends on anything else that changes (other random streams, a clock,
    layers that communicate) cannot be probed: it looks like corruption.

    Raises ``ValueError`` for values out of range.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Any],
        every: int = 1000,
        *,
        tolerance: float = 1e-4,
        on_corruption: Literal["raise", "warn"] = "raise",
    ) -> None:
        if every < 1:
            raise ValueError(
                f"CorruptionProbe: every is {every}, expected a number of steps from 1 up"
            )
        if not tolerance >= 0:
            raise ValueError(f"CorruptionProbe: tolerance is {tolerance}, expected 0 or more")
        if on_corruption not in ("raise", "warn"):
            raise ValueError(
                f"CorruptionProbe: on_corruption is {on_corruption!r}, expected 'raise' or 'warn'"
            )
        self.loss = loss
        self.every = every
        self.tolerance = tolerance
        self.on_corruption = on_corruption
        self._calls = StepCount()
        # The step of the last probe that each rank took part in and that found nothing.
        self._good: dict[int, int] = {}

    def _check(self, backend: Backend, batch: Any) -> tuple[int, ...]:
        """Count a step and, when it is due, probe; the ranks that were found to be wrong."""
        step = self._calls.next()
        if step % self.every:
            return ()
        number = step // self.every - 1
        if step <= max(self._good.values(), default=0):
            self._good.clear()  # the ranks have met anew, and may be others
        pair = _pair(number, verbs.size())
        finding = _Round(backend, self.tolerance, pair, step).run(batch)
        if finding is None:
            self._good.update(dict.fromkeys(pair, step))
            return ()
        text = f"step {step}: {finding.text}. {self._advice(finding.ranks or pair)}"
        if self.on_corruption == "raise":
            raise SilentCorruption(f"rank {verbs.rank()} of {verbs.size()}: {text}")
        if verbs.rank() == 0:
            logger.warning("%s", text)
        return finding.ranks

    def _advice(self, suspects: Sequence[int]) -> str:
        good = min(self._good.get(rank, 0) for rank in suspects)
        where = "from before this run" if good == 0 else f"of step {good} or before"
        out = "its device or host" if len(suspects) == 1 else "the faulty device or host"
        return f"Take {out} out of the run, and go back to a checkpoint {where}"


def _pair(number: int, ranks: int) -> tuple[int, ...]:
    """The ranks of a probe: each meets each other one in turn."""
    if ranks == 1:
        return (0,)
    first = number % ranks
    apart = 1 + number // ranks % (ranks - 1)
    return first, (first + apart) % ranks


class _Round:
    """One probe of one pair; collective."""

    def __init__(
        self, backend: Backend, tolerance: float, pair: tuple[int, ...], seed: int
    ) -> None:
        self._backend = backend
        self._tolerance = tolerance
        self._pair = pair
        self._seed = seed
        self._given: dict[int, tuple[Any, Any]] = {}
        self._results: dict[int, Gradients] = {}

    def run(self, batch: Any) -> Finding | None:
        replicas.check(self._backend.parameters)
        mine = _everywhere(lambda: self._prepare(batch))
        for owner in self._pair:
            self._given[owner] = verbs.broadcast_object(mine, owner, "hvdsync.probe.batch")
        found = _everywhere(self._compute)
        everyone: list[Any] = verbs.allgather_object(found, "hvdsync.probe.results")
        unsteady = {rank: one[1] for rank, one in enumerate(everyone) if one and one[1]}
        if unsteady:
            return Finding(tuple(unsteady), _unsteady(unsteady))
        if len(self._pair) == 1:
            return None
        digests = [one[0] if one else {} for one in everyone]
        a, b = self._pair
        unequal = [owner for owner in self._pair if digests[a][owner] != digests[b][owner]]
        differences = {owner: self._difference(owner, b if owner == a else a) for owner in unequal}
        differences = {owner: text for owner, text in differences.items() if text}
        return self._decide(differences) if differences else None

    def _prepare(self, batch: Any) -> tuple[Any, Any] | None:
        if verbs.rank() not in self._pair:
            return None
        return self._backend.portable(batch), self._backend.state()

    def _compute(self) -> tuple[dict[int, bytes], str] | None:
        """Digests of this rank's results by the batch's rank, and where it differed from itself."""
        if verbs.rank() not in self._pair:
            return None
        unsteady = ""
        for owner in self._pair:
            self._results[owner] = self._gradients(owner)
            again = self._gradients(owner)
            unsteady = unsteady or _differ(self._results[owner], again, self._tolerance)
        return {owner: _digest(result) for owner, result in self._results.items()}, unsteady

    def _gradients(self, owner: int) -> Gradients:
        batch, state = self._given[owner]
        own = self._backend.state()
        self._backend.put(state)
        try:
            return self._backend.gradients(batch, self._seed)
        finally:
            self._backend.put(own)

    def _difference(self, owner: int, other: int) -> str:
        """How the result of ``other`` for a batch differs from that of its own rank."""
        theirs = verbs.broadcast_object(self._results.get(owner), other, "hvdsync.probe.gradients")
        text = ""
        if verbs.rank() == owner:
            text = _differ(self._results[owner], theirs, self._tolerance)
        return str(verbs.broadcast_object(text, owner, "hvdsync.probe.difference"))

    def _decide(self, differences: Mapping[int, str]) -> Finding:
        a, b = self._pair
        owner, difference = next(iter(differences.items()))
        dispute = f"for one batch of rank {owner} {listed((a, b))} give different {difference}"
        if verbs.size() < 3:
            return Finding(
                (),
                f"one of two ranks computes wrong numbers: {dispute}, and each comes to its own "
                "results again. Which of them is wrong, a third rank would tell",
            )
        third = next(rank for rank in range(verbs.size()) if rank not in self._pair)
        result = _everywhere(lambda: self._gradients(owner) if verbs.rank() == third else None)
        result = verbs.broadcast_object(result, third, "hvdsync.probe.third")
        mine = ""
        if verbs.rank() in self._pair:
            mine = _differ(self._results[owner], result, self._tolerance)
        told = verbs.allgather_object(mine, "hvdsync.probe.decision")
        wrong = tuple(rank for rank in self._pair if told[rank])
        if len(wrong) == 1:
            right = sorted({a, b, third} - set(wrong))
            return Finding(
                wrong,
                f"rank {wrong[0]} computes wrong numbers: {dispute}, and {listed(right)} agree",
            )
        return Finding(
            (), f"several ranks compute wrong numbers: {dispute}, and rank {third} others again"
        )


def _everywhere(action: Callable[[], Any]) -> Any:
    """What ``action`` gives; where it failed on a rank, that error, and one of ours elsewhere."""
    failure: Exception | None = None
    result = None
    try:
        result = action()
    except Exception as error:  # the other ranks wait for this one
        failure = error
    verbs.raise_on_all(
        failure, "the corruption probe could not compute everywhere", "hvdsync.probe.failure"
    )
    return result


def _unsteady(found: Mapping[int, str]) -> str:
    parts = [
        f"rank {rank} computes wrong numbers: given the same batch twice it gave different {text}"
        for rank, text in found.items()
    ]
    return "; ".join(parts)


def _digest(gradients: Gradients) -> bytes:
    together = xxhash.xxh3_128()
    for name, array in gradients:
        together.update(f"{name}\0{array.dtype} {array.shape}\0".encode())
        together.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return together.digest()


def _differ(ours: Gradients, theirs: Gradients, tolerance: float) -> str:
    """Where and by how much two results differ by more than the tolerance; empty if nowhere."""
    least = _LEAST_SHARE * max((_greatest(array) for _, array in (*ours, *theirs)), default=0.0)
    for (name, a), (_, b) in zip(ours, theirs, strict=True):
        label = f"gradients of {name!r} ({a.dtype} {a.shape})"
        if a.shape != b.shape:
            return f"{label}: the other has shape {b.shape}"
        allowed = tolerance * max(_greatest(a), _greatest(b), least)
        a, b = (np.asarray(array, np.float64) for array in (a, b))
        with np.errstate(all="ignore"):
            apart = np.abs(a - b)
        alike = (a == b) | (np.isnan(a) & np.isnan(b)) | (apart <= allowed)
        if not alike.all():
            by = apart[~alike]
            most = f"{by.max():.6g}" if np.isfinite(by).all() else "more than any number"
            return (
                f"{label}, in {by.size:,} of {a.size:,} elements, by at most {most} where "
                f"{allowed:.6g} is the tolerance"
            )
    return ""


def _greatest(array: np.ndarray) -> float:
    """The greatest absolute value that is finite."""
    sizes = np.abs(np.asarray(array, np.float64))
    return float(np.max(sizes, initial=0.0, where=np.isfinite(sizes)))
