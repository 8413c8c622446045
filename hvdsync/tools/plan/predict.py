"""Measured costs, gradients, a network and a number of workers in; the time of a step out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvdsync.tools.plan.network import Network, in_memory
from hvdsync.tools.plan.payload import Bucket, sent_on_network
from hvdsync.tools.plan.timeline import Journey, Transfer, step_seconds

# So much slower, the simpler choice is the better one.
_NOT_WORTH = 0.03
# Reading the anchor, the momentum and the mean, and writing two of them.
_OUTER_PASSES = 5
_SLOWEST, _FASTEST = 1e3, 1e13


@dataclass(frozen=True)
class Choice:
    """An update rule and a compression; ``period`` is 1 where workers step together."""

    compression: str = "none"
    rule: str = "synchronous"
    period: int = 1

    @property
    def name(self) -> str:
        """As ``bench link`` has it."""
        name = self.rule if self.period == 1 else f"{self.rule}, period {self.period}"
        return name if self.compression == "none" else f"{name}, {self.compression}"


PLAIN = Choice()
#: The simplest first.
CHOICES = (
    PLAIN,
    *(Choice(name) for name in ("fp16", "bf16", "powersgd:1", "powersgd:4", "topk:0.01", "onebit")),
    Choice(rule="local SGD", period=4),
    Choice(rule="local SGD", period=16),
    Choice(rule="DiLoCo", period=16),
    Choice("fp16", "DiLoCo", 16),
)


@dataclass(frozen=True)
class Cost:
    """Seconds that a worker's core spends per byte of gradients on a compression, or on none.

    ``before`` they travel, filling buckets among it; ``after`` they have come, and then for each
    worker's part (``after_per_worker``).
    """

    before: float
    after: float
    after_per_worker: float = 0.0


@dataclass(frozen=True)
class Machine:
    """One worker: seconds of a step alone, costs of compressions by name, cores of its host.

    ``copied`` and ``added`` are seconds per byte of copying memory and of adding it up.
    """

    compute: float
    costs: Mapping[str, Cost]
    copied: float
    added: float
    cores: int

    def slower(self, factor: float) -> Machine:
        """The same when everything takes so many times as long."""
        costs = {
            name: Cost(*(factor * value for value in vars(cost).values()))
            for name, cost in self.costs.items()
        }
        return Machine(
            factor * self.compute, costs, factor * self.copied, factor * self.added, self.cores
        )


@dataclass(frozen=True)
class Prediction:
    """``seconds`` of a step, ``compute`` those it would take alone; bytes a worker sends in it."""

    seconds: float
    compute: float
    sent_bytes: float

    @property
    def efficiency(self) -> float:
        """The time of the step that is not lost to other workers."""
        return self.compute / self.seconds


def predict(
    choice: Choice, machine: Machine, buckets: Sequence[Bucket], network: Network, workers: int
) -> Prediction:
    """What a step takes with a choice, on average over its period.

    Only where all workers are on one host are they more than its cores, and wait for one another.
    """
    alone = machine.compute
    if network.is_one_host(workers):
        machine = machine.slower(max(1.0, workers / machine.cores))
    if workers == 1:
        return Prediction(machine.compute, alone, 0.0)
    # Backward is taken to bring gradients as evenly as their bytes are spread over it.
    whole = sum(bucket.nbytes for bucket in buckets)
    journeys = [
        _journey(choice, machine, bucket, network, workers, bucket.nbytes / whole)
        for bucket in buckets
    ]
    sent = sum(
        sent_on_network(bucket.legs(choice.compression, workers), workers) for bucket in buckets
    )
    # What workers take to meet in memory has it already.
    skew = 0.0 if _is_in_memory(choice, network, workers) else network.skew_seconds
    if choice.period == 1:
        if _is_crowded(machine, network, workers):
            seconds = machine.compute + step_seconds(0.0, journeys)
        else:
            seconds = step_seconds(machine.compute, journeys)
        return Prediction(seconds + skew, alone, sent)
    meeting = step_seconds(0.0, journeys) + skew
    if choice.rule == "DiLoCo":
        meeting += _OUTER_PASSES * machine.copied * whole
    return Prediction(machine.compute + meeting / choice.period, alone, sent / choice.period)


def _is_in_memory(choice: Choice, network: Network, workers: int) -> bool:
    return choice == PLAIN and network.is_one_host(workers)


def _is_crowded(machine: Machine, network: Network, workers: int) -> bool:
    """Whether no core is left that would agree on collectives, or move bytes, beside computing."""
    return network.is_one_host(workers) and workers >= machine.cores


def _journey(
    choice: Choice,
    machine: Machine,
    bucket: Bucket,
    network: Network,
    workers: int,
    ready: float,
) -> Journey:
    if _is_in_memory(choice, network, workers):
        spent = in_memory(workers, bucket.nbytes, machine.added)
        return Journey(ready, 0.0, [Transfer(network.meeting_seconds, 0.0)], spent)
    legs = bucket.legs(choice.compression, workers)
    delay = network.delay(workers)
    travels = [network.collective(leg.kind, workers, leg.nbytes) for leg in legs]
    if _is_crowded(machine, network, workers):
        # While ranks agree on one collective no core is there for another.
        transfers = [Transfer(0.0, delay + travel) for travel in travels]
    else:
        transfers = [Transfer(delay, travel) for travel in travels]
    cost = machine.costs[choice.compression]
    after = (cost.after + workers * cost.after_per_worker) * bucket.nbytes
    return Journey(ready, cost.before * bucket.nbytes, transfers, after)


def best(predictions: Mapping[Choice, Prediction]) -> Choice:
    """The simplest of those that are hardly slower than the fastest."""
    fastest = min(prediction.seconds for prediction in predictions.values())
    return next(
        choice
        for choice, prediction in predictions.items()
        if prediction.seconds <= (1 + _NOT_WORTH) * fastest
    )


def break_even(seconds_at: Callable[[float], tuple[float, float]]) -> float | None:
    """The nominal rate of a link, in bits per second, below which the first time is the smaller.

    ``seconds_at`` gives both at a rate. None where it is at no rate, infinity where it is at all.
    """

    def wins(rate: float) -> bool:
        first, second = seconds_at(rate)
        return first < second

    if wins(_FASTEST):
        return float("inf")
    low, high = _FASTEST, _FASTEST
    while not wins(low):
        high, low = low, low / 2
        if low < _SLOWEST:
            return None
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if wins(middle) else (low, middle)
    return low
