"""The verdict on a stretch of steps: what all ranks measured in, the slowest and its cause out.

Pure functions of the gathered numbers, so that every rank comes to the same words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdsync.guard.time_split import EVIDENCE, STEP

KINDS = ("data", "compute", "waiting", "communication", "checkpoint")
# What a rank does by itself, while the others may be waiting for it.
OWN = ("data", "compute", "checkpoint")

# Busy for more of the time than this, processors compute; for less, they mostly stand.
_BUSY = 0.5
# A thread that has or wants a processor for more of the time than this computes. The share is
# higher: on a crowded machine one that just wakes now and then wants one for most of the time.
_WANTED = 0.8
# Bytes for each second of waiting for data that count as reading files: little for any disk.
_READING = 64 * 1024
# Share of its computing that a rank may be kept from by other processes without a word.
_CROWDED = 0.3


@dataclass(frozen=True)
class StragglerReport:
    """Where the time of each rank went, from ``first_step`` to ``last_step`` (from 1).

    ``seconds[kind]`` is an array (ranks, steps) for each of ``KINDS``: data, compute, waiting,
    communication, checkpoint. ``slowest`` is the rank that spent most on its own in the mean step,
    ``excess`` by how many seconds more than the median of the others, ``lost`` which share of the
    time of a step that is, and ``kind`` what it is spent on, as ``why`` says in words. With one
    rank ``excess`` and ``lost`` are 0.
    """

    first_step: int
    last_step: int
    seconds: dict[str, np.ndarray]
    slowest: int
    excess: float
    lost: float
    kind: str
    why: str
    text: str

    def __str__(self) -> str:
        return self.text


def judge(first_step: int, rows: np.ndarray, evidence: np.ndarray) -> StragglerReport:
    """The report on all ranks' ``rows`` (ranks, steps, 4) and ``evidence`` (ranks, 8).

    See :mod:`hvdsync.guard.time_split` for what these hold.
    """
    whole, data, stalled, checkpoint = (rows[:, :, i] for i in range(len(STEP)))
    # Who comes last to a collective has nobody to wait for.
    communication = np.broadcast_to(stalled.min(axis=0), stalled.shape)
    seconds = {
        "data": data,
        "compute": np.maximum(whole - data - stalled - checkpoint, 0.0),
        "waiting": stalled - communication,
        "communication": communication,
        "checkpoint": checkpoint,
    }
    means = {kind: values.mean(axis=1) for kind, values in seconds.items()}
    own = np.sum([means[kind] for kind in OWN], axis=0)
    slowest = int(np.argmax(own))
    others = np.arange(len(own)) != slowest
    excess, kind = 0.0, max(OWN, key=lambda k: float(means[k][slowest]))
    if others.any():
        excess = max(float(own[slowest] - np.median(own[others])), 0.0)
        kind = max(OWN, key=lambda k: _more(means[k], slowest, others))
    step = float(whole.mean())
    lost = excess / step if step > 0 else 0.0
    steps = whole.shape[1]
    spent = float(seconds[kind][slowest].sum())
    known = dict(zip(EVIDENCE, evidence[slowest], strict=True))
    why = _why(kind, spent, float(stalled[slowest].sum()), known, steps)
    last_step = first_step + steps - 1
    text = _sentence(first_step, last_step, means, own, slowest, others, lost, kind, why)
    return StragglerReport(first_step, last_step, seconds, slowest, excess, lost, kind, why, text)


def _more(means: np.ndarray, slowest: int, others: np.ndarray) -> float:
    return float(means[slowest] - np.median(means[others]))


def _why(kind: str, spent: float, stalled: float, evidence: dict[str, float], steps: int) -> str:
    """What the slowest rank did in the ``spent`` seconds of ``kind``, in words."""
    if kind == "checkpoint":
        return "it saves"
    if kind == "data":
        return _why_data(spent, evidence, steps)
    # A thread that stands still in a collective may keep its processor.
    cpu = evidence["cpu"] - evidence["data_cpu"] - stalled
    wanted = evidence["wanted"] - evidence["data_wanted"] - stalled
    if not _is_busy(cpu, wanted, spent):
        return "it is mostly idle there: it sleeps, or waits for a device, a lock or a network"
    if evidence["delayed"] > _CROWDED * spent:
        delayed = _ms(min(evidence["delayed"], spent) / steps)
        return f"it is busy there, and others have its processors for {delayed} a step"
    return "it is busy there: more work than others, or a slower processor"


def _why_data(spent: float, evidence: dict[str, float], steps: int) -> str:
    cpu, wanted = evidence["data_cpu"], evidence["data_wanted"]
    read, where = evidence["data_read"], ""
    if evidence["children_cpu"] > _BUSY * cpu or evidence["children_read"] > read:
        # What this process reads then are the batches that they hand over.
        cpu, read = evidence["children_cpu"], evidence["children_read"]
        where = " in loader workers"
    if read > _READING * spent:
        pace = f"{read / steps / 2**20:.3g} MiB a step, {read / spent / 2**20:.3g} MiB/s"
        return f"it reads files there{where}: {pace}"
    if _is_busy(cpu, wanted, spent):
        return f"it computes there{where}: decoding, augmentation"
    return f"it is idle there{where}: its loader sleeps, or waits for a lock or a network"


def _is_busy(cpu: float, wanted: float, spent: float) -> bool:
    return cpu > _BUSY * spent or wanted > _WANTED * spent


def _sentence(
    first: int,
    last: int,
    means: dict[str, np.ndarray],
    own: np.ndarray,
    slowest: int,
    others: np.ndarray,
    lost: float,
    kind: str,
    why: str,
) -> str:
    steps = f"steps {first} to {last}"
    if not others.any():
        shares = ", ".join(f"{k} {_ms(means[k][0])}" for k in OWN)
        return f"{steps}: {shares} a step; {why}"
    waiting = float(np.median(means["waiting"][others]))
    typical = float(np.median(own[others]))
    of_kind = float(np.median(means[kind][others]))
    return (
        f"{steps}: rank {slowest} is the slowest, with {_ms(own[slowest])} a step of its own, the "
        f"others {_ms(typical)} (median); they wait {_ms(waiting)} a step for others, and it costs "
        f"{lost:.0%} of the time. Cause: {kind}, {_ms(means[kind][slowest])} a step where others "
        f"take {_ms(of_kind)}; {why}"
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
