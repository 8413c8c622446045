"""In: batches of this rank, of which other ranks may have more or fewer. Out: as many on all ranks,
by a policy that is chosen, each with the factor that keeps the average one over samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

from hvdsync.comm import verbs, world
from hvdsync.errors import DataError, HvdsyncError

logger = logging.getLogger(__name__)

Policy = Literal["min", "pad", "join"]

# What a rank tells the others before each step.
_READY, _OUT, _FAILED = range(3)

_OUTCOMES = {
    "min": "an epoch ends after {least}, and {left} are left out",
    "pad": "an epoch ends after {most}; who has none left repeats one with weight 0",
    "join": "an epoch ends after {most}; who has none left takes part with nothing",
}


class EvenBatches:
    """Iterating gives the batches of this rank, and ends on all ranks after the same step.

    ``step_with_nothing`` is what "join" does on a rank that has no batch left, in place of the
    loop's body; ``from_start`` says whether it can before the first batch. ``as_scale`` makes the
    framework's number of a factor. For the rest see the front doors' ``even_batches``.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        policy: Policy = "min",
        *,
        weight: Callable[[Any], float] | None = None,
        step_with_nothing: Callable[[], None] | None = None,
        from_start: bool = True,
        as_scale: Callable[[float], Any] = float,
    ) -> None:
        check_policy(policy)
        if policy == "join" and step_with_nothing is None:
            raise ValueError(
                "even_batches: policy='join' needs optimizer=, the distributed optimizer whose "
                "steps a rank without batches takes part in"
            )
        self.policy: Policy = policy
        self._batches = batches
        self._weight = weight or count_samples
        self._step_with_nothing = step_with_nothing
        self._from_start = from_start
        self._as_scale = as_scale
        self._scale = 1.0
        self._scale_was_used = True
        self._logged: tuple[int, ...] | None = None

    @property
    def scale(self) -> Any:
        """What the loss of the batch at hand, a mean over its samples, is multiplied by.

        The average of gradients over ranks then is the gradient of the mean over the samples of
        all ranks: ``n * ranks / sum of n``, with n the weight of the batch, 0 for one that is
        repeated. Always 1 with "min". Read it in each step.
        """
        self._scale_was_used = True
        return self._as_scale(self._scale)

    def __iter__(self) -> Iterator[Any]:
        self._scale, self._scale_was_used = 1.0, True
        if world.current().size == 1:
            return iter(self._batches)
        if self.policy == "min":
            counts = agree_counts(_length(self._batches))
            if counts is not None:
                self._log(counts)
                return _first(self._batches, min(counts))
        return self._step_by_step()

    def _step_by_step(self) -> Iterator[Any]:
        source = iter(self._batches)
        batch: Any = None
        counts = np.zeros(world.current().size, np.int64)
        out = False
        step = 0
        while True:
            step += 1
            state, weight, failure = _OUT, 0.0, None
            if not out:
                try:
                    batch = next(source)
                    state, weight = _READY, float(self._weight(batch))
                except StopIteration:
                    out = True
                except Exception as error:  # the other ranks wait for this one's word
                    state, failure = _FAILED, error
            states, weights = self._exchange(step, state, weight, failure)
            ready = states == _READY
            counts += ready
            if not ready.any() or (self.policy == "min" and not ready.all()):
                self._log(counts.tolist())
                return
            if step == 1 and not ready.all() and (self.policy == "pad" or not self._from_start):
                self._refuse_a_rank_without_any(ready)
            if self.policy == "join" and out:
                assert self._step_with_nothing is not None
                self._step_with_nothing()
                continue
            if self.policy != "min":
                total = float(weights.sum())
                if total == 0:
                    raise ValueError(
                        f"even_batches: step {step}: the weights of all ranks' batches are 0, so "
                        "there is no mean"
                    )
                self._scale = weight * len(weights) / total
                self._scale_was_used = self._scale == 1.0
            yield batch

    def _exchange(
        self, step: int, state: int, weight: float, failure: Exception | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """States and weights of all ranks; 24 bytes a rank. Raises on all what is wrong on one."""
        comm = world.current()
        mine = np.array([state, weight, not self._scale_was_used], np.float64)
        everyone = comm.allgather(mine, "hvdsync.even_batches.step").reshape(-1, 3)
        failed = np.flatnonzero(everyone[:, 0] == _FAILED).tolist()
        if failed:
            texts = verbs.allgather_object(failure and repr(failure), "hvdsync.even_batches.failed")
            if failure is not None:
                raise failure
            raise DataError(
                f"rank {comm.rank}: step {step}: rank {failed[0]} could not read its batch: "
                f"{texts[failed[0]]}; its own traceback says where"
            )
        unused = np.flatnonzero(everyone[:, 2]).tolist()
        if unused:
            raise HvdsyncError(
                f"rank {comm.rank}: even_batches(policy={self.policy!r}): in step {step - 1} rank "
                f"{unused[0]} did not use the factor of its batch, so the average over ranks was "
                "none over samples; multiply each loss by batches.scale, read in every step "
                "(outside of a tf.function, which would keep the first value)"
            )
        return everyone[:, 0], everyone[:, 1]

    def _refuse_a_rank_without_any(self, ready: np.ndarray) -> None:
        rank = int(np.flatnonzero(~ready)[0])
        raise DataError(
            f"rank {world.current().rank}: even_batches(policy={self.policy!r}): rank {rank} has "
            "no batch at all, so there is nothing that it could repeat or take part with; give it "
            "data, or choose policy='min'"
        )

    def _log(self, counts: Sequence[int]) -> None:
        if world.current().rank == 0 and self._logged != tuple(counts):
            log_policy(self.policy, counts)
        self._logged = tuple(counts)


def check_policy(policy: str) -> None:
    """Raise ``ValueError`` for a policy that does not exist."""
    if policy not in get_args(Policy):
        raise ValueError(
            f"even_batches: policy is {policy!r}; expected {', '.join(map(repr, get_args(Policy)))}"
        )


def agree_counts(count: int | None) -> list[int] | None:
    """The numbers of batches of all ranks, or None when one of them does not know its own.

    One all-gather of 8 bytes a rank.
    """
    mine = np.array([-1 if count is None else count], np.int64)
    everyone = world.current().allgather(mine, "hvdsync.even_batches.counts").tolist()
    return None if -1 in everyone else everyone


def step_scales(counts: Sequence[int], rank: int) -> np.ndarray:
    """The factor of each step's batch of ``rank``, float64 (steps,), where batches count alike.

    0 where the rank has none left, otherwise ranks / ranks that still have one.
    """
    has_one = np.arange(max(counts)) < np.asarray(counts)[:, None]
    return has_one[rank] * len(counts) / has_one.sum(axis=0)


def log_policy(policy: Policy, counts: Sequence[int]) -> None:
    """Say what the policy does about these numbers of batches; nothing when they are equal."""
    least, most = min(counts), max(counts)
    if least == most:
        return
    outcome = _OUTCOMES[policy].format(
        least=least, most=most, left=sum(counts) - least * len(counts)
    )
    level = logging.WARNING if policy == "min" and least == 0 else logging.INFO
    shown = ", ".join(map(str, counts))
    logger.log(level, "batches by rank: %s; policy %r: %s", shown, policy, outcome)


def count_samples(batch: Any) -> int:
    """The length of the first array of a batch; 1 when there is none."""
    while isinstance(batch, dict | list | tuple) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) else 1


def _length(batches: Any) -> int | None:
    try:
        return len(batches)
    except TypeError:  # a generator, or a data set that does not know
        return None


def _first(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """The first ``count`` of this rank's batches. Raises ``DataError`` when there are fewer."""
    given = 0
    source = iter(batches)
    while given < count:
        try:
            batch = next(source)
        except StopIteration:
            raise DataError(
                f"rank {world.current().rank}: found {given} batches where their length said "
                f"{_length(batches)}; hand over an iterator without a length, iter(...), and the "
                "ranks ask one another at each step"
            ) from None
        given += 1
        yield batch
