"""Workers, bytes and a link in; seconds of a collective out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# What Ethernet, IP and TCP leave of a link.
_PAYLOAD = 0.95


@dataclass(frozen=True)
class Network:
    """What workers talk over.

    ``carried`` is what a host sends to another, in bits of payload per second each way; None where
    all workers are on one host. ``hop_seconds`` is what a message takes to another worker,
    ``call_seconds`` what Horovod takes for a collective besides messages and bytes.
    ``local_carried`` is ``carried`` between processes of one host, ``meeting_seconds`` what they
    take to reduce nothing in memory that they have in common, after a step's computing.
    ``skew_seconds`` is what the sooner of two then waits for the later, once in a step.
    ``is_mpi``: small all-reduces may go along a tree, while Gloo sends everything around a ring.
    """

    carried: float | None
    hop_seconds: float
    call_seconds: float
    local_carried: float
    workers_per_host: int = 1
    is_mpi: bool = False
    meeting_seconds: float = 2e-4
    skew_seconds: float = 0.0

    @classmethod
    def of_link(cls, rate: float | None, **more: object) -> Network:
        """That of a link by its nominal rate, of which headers take 5 %."""
        return cls(None if rate is None else _PAYLOAD * rate, **more)  # type: ignore[arg-type]

    def with_rate(self, rate: float) -> Network:
        """The same with another nominal rate."""
        return replace(self, carried=_PAYLOAD * rate)

    def is_one_host(self, workers: int) -> bool:
        """Whether so many workers are on one host."""
        return self.carried is None or workers <= self.workers_per_host

    def _seconds_per_byte(self, workers: int) -> float:
        if self.carried is None or self.is_one_host(workers):
            return 8 / self.local_carried
        return 8 / self.carried

    def _turns(self, turns: int, workers: int, nbytes: float) -> float:
        """So many turns, each of which sends so many bytes."""
        return turns * (self.hop_seconds + nbytes * self._seconds_per_byte(workers))

    def ring(self, workers: int, nbytes: float) -> float:
        """An all-reduce in which every worker sends 2 (N - 1) / N of the bytes, in 2 (N - 1) turns.

        Neighbours of one host leave its link to one pair, so that it carries as much as one worker
        sends. Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of
        Workstations", 2009.
        """
        return self._turns(2 * (workers - 1), workers, nbytes / workers)

    def tree(self, workers: int, nbytes: float) -> float:
        """An all-reduce up a binomial tree and down again: few turns, all bytes in each."""
        return self._turns(2 * math.ceil(math.log2(workers)), workers, nbytes)

    def by_hosts(self, workers: int, nbytes: float, added_seconds_per_byte: float) -> float:
        """An all-reduce in memory within each host, around a ring of hosts, and back to memory."""
        hosts = -(-workers // self.workers_per_host)
        if self.carried is None:
            hosts = 1
        within = in_memory(-(-workers // hosts), nbytes, added_seconds_per_byte)
        if hosts == 1:
            return within
        return within + replace(self, workers_per_host=1).ring(hosts, nbytes)

    def all_reduce(self, workers: int, nbytes: float) -> float:
        """By a ring, or by a tree where there are trees (MPI) and it is faster."""
        ring = self.ring(workers, nbytes)
        return min(ring, self.tree(workers, nbytes)) if self.is_mpi else ring

    def all_gather(self, workers: int, nbytes: float) -> float:
        """Around a ring: what each worker has, ``nbytes``, passes all the others."""
        return self._turns(workers - 1, workers, nbytes)

    def all_to_all(self, workers: int, nbytes: float) -> float:
        """Each worker sends every other one its share of ``nbytes``.

        The workers of a host have its link together.
        """
        inside = 1 if self.is_one_host(workers) else self.workers_per_host
        leaving = inside * (workers - inside) / workers
        turns = workers - 1
        return self._turns(turns, workers, leaving * nbytes / turns)

    def collective(self, kind: str, workers: int, nbytes: float) -> float:
        """Of a kind of :class:`hvdsync.sync.compression.exchange.Collective`."""
        kinds = {"sum": self.all_reduce, "gather": self.all_gather, "alltoall": self.all_to_all}
        return kinds[kind](workers, nbytes)

    def delay(self, workers: int) -> float:
        """Seconds from a call until bytes move: Horovod's ranks agree that all have called."""
        return self.call_seconds + self.all_reduce(workers, 0)

    def after_empty(self, seconds: float, late: float) -> Network:
        """The same, such that two workers' empty all-reduce takes ``seconds``.

        After a step's computing it takes ``late``.
        """
        free = replace(self, call_seconds=0.0)
        messages = free.delay(2) + free.all_reduce(2, 0)
        return replace(
            self,
            call_seconds=max(seconds - messages, 0.0),
            skew_seconds=max(late - seconds, 0.0),
        )


def in_memory(workers: int, nbytes: float, added_seconds_per_byte: float) -> float:
    """An all-reduce through memory in common.

    Each worker writes its own and, up to three, adds up everybody's. More of them add up a share
    each, which is as much as one's own in all, and read those of the others.
    """
    if workers == 1:
        return 0.0
    passes = 1 + workers if workers <= 3 else 3
    return passes * nbytes * added_seconds_per_byte
