"""What each rank of ``bench link`` does: settings in as JSON, times of steps out as JSON (rank 0).

Everything that is compared lives in one process and takes turns, round after round.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch
from torch.nn.parallel import DistributedDataParallel

import hvdsync.torch as hvd
from hvdsync.comm import horovod
from hvdsync.comm.launch import detect
from hvdsync.tools.bench import step_torch, torch_models
from hvdsync.tools.bench.link import (
    COMPUTE_ONLY,
    SYNCHRONOUS,
    OnLink,
    Settings,
    is_as_asked,
)

_LR = 1e-3
# A link is measured with a message of so many seconds, within limits that memory and noise set.
_PROBE_SECONDS = 0.5
_LEAST_PROBE_BYTES, _MOST_PROBE_BYTES = 2**20, 64 * 2**20
_PROBES = 5
_SMALL_PROBES = 50
# The first turn makes what is made once (plans, buffers, connections), the second says how long
# the next ones will be.
_WARM_UP_TURNS = 2
_TURN_SECONDS = 0.4
_MOST_PERIODS = 32


@dataclass
class Contender:
    """Something that takes a step; ``period`` steps make a whole of it, a turn is ``periods``."""

    step: Callable[[], None]
    period: int = 1
    periods: int = 1

    @property
    def steps(self) -> int:
        """Steps of a turn."""
        return self.period * self.periods

    def take_turn(self) -> None:
        """Take them."""
        for _ in range(self.steps):
            self.step()


def contenders(settings: Settings) -> dict[str, Contender]:
    """All that is compared, by the name of its row; each has a model of its own."""
    batch = torch_models.batch_for(settings.model, seed=hvd.rank())
    found: dict[str, Contender] = {}

    def plain() -> tuple[Any, Any]:
        model = torch_models.make(settings.model)
        return model, torch.optim.SGD(model.parameters(), _LR)

    def add(name: str, model: Any, optimizer: Any, period: int = 1) -> None:
        found[name] = Contender(torch_models.training_step(model, optimizer, batch), period)

    def add_ours(name: str, compression: str, period: int = 1, update: Any = None) -> None:
        chosen = hvd.Compression.named(compression)
        full = name if compression == "none" else f"{name}, {compression}"
        add(full, *hvd.distribute(*plain(), update=update, compression=chosen), period)

    add(COMPUTE_ONLY, *plain())
    for compression in ("none", *settings.compressions):
        add_ours(SYNCHRONOUS, compression)
    for period in settings.periods:
        add_ours(f"local SGD, period {period}", "none", period, hvd.LocalSGD(period))
    for compression in ("none", "fp16"):
        period = max(settings.periods)
        add_ours(f"DiLoCo, period {period}", compression, period, hvd.DiLoCo(period))
    raw: Any = horovod.load("torch")
    for name in ("none", "fp16"):
        model, optimizer = plain()
        wrapped = raw.DistributedOptimizer(
            optimizer, model.named_parameters(), compression=getattr(raw.Compression, name)
        )
        add("raw Horovod" + ("" if name == "none" else f", {name}"), model, wrapped)
    for megabytes in step_torch.BUCKETS_MB:
        data_parallel = DistributedDataParallel(
            torch_models.make(settings.model),
            bucket_cap_mb=megabytes,
            gradient_as_bucket_view=True,
        )
        optimizer = torch.optim.SGD(data_parallel.parameters(), _LR)
        add(f"DDP, {megabytes} MB buckets", data_parallel, optimizer)
    return found


def probe_rate(rate: float | None) -> float:
    """Bits per second that each rank sends in a bare all-reduce, at best.

    The bus bandwidth as nccl-tests defines it.
    """
    length = int((rate or 1e12) / 8 * _PROBE_SECONDS)
    nbytes = min(max(length, _LEAST_PROBE_BYTES), _MOST_PROBE_BYTES)
    share = 2 * (hvd.size() - 1) / hvd.size()
    message = torch.ones(nbytes // 4)
    times = [_timed(lambda: hvd.allreduce(message, name="probe")) for _ in range(_PROBES)]
    return 8 * nbytes * share / min(times[1:])  # in the first, Horovod learns the name


def probe_latency(compute: Callable[[], None]) -> float:
    """Seconds of an empty all-reduce that follows a step's computing."""
    return _after(compute, _reduce_nothing)


def probe_call(compute: Callable[[], None]) -> float:
    """Seconds of an empty all-reduce that follows another."""

    def compute_and_meet() -> None:
        compute()
        _reduce_nothing()

    return _after(compute_and_meet, _reduce_nothing)


def _reduce_nothing() -> None:
    hvd.allreduce(torch.ones(1), name="nothing")


def probe_meeting(compute: Callable[[], None]) -> float:
    """Seconds in which a gradient of one number is reduced after a step's computing."""
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = hvd.distribute(model, torch.optim.SGD(model.parameters(), _LR))
    return _after(compute, optimizer._reducer.flush)


def _after(compute: Callable[[], None], reduce: Callable[[], object]) -> float:
    """Seconds of the second after the first, a mean over times and ranks.

    That is what it takes in training: threads have cores to win back, and one rank waits for the
    other.
    """
    waits = []
    for _ in range(_SMALL_PROBES):
        compute()
        waits.append(_timed(reduce))
    return float(hvd.allreduce(torch.tensor(fmean(waits[1:])), name="mean"))


def _timed(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def measure(settings: Settings, rate: float | None) -> OnLink:
    """All times on one link; collective. They are seconds per step of the slowest rank.

    There are none where the link does not carry what it should.
    """
    step_torch.start()
    torch.set_num_threads(1)
    carried = hvd.broadcast_object(probe_rate(rate))
    raced = contenders(settings) if is_as_asked(rate, carried) else {}
    latency, call, meeting = (
        probe(raced[COMPUTE_ONLY].step) if raced else 0.0
        for probe in (probe_latency, probe_call, probe_meeting)
    )
    times, sent = _race(raced, settings.rounds)
    of_all = hvd.allgather_object(times)
    slowest = {
        name: [max(turn) for turn in zip(*(own[name] for own in of_all), strict=True)]
        for name in times
    }
    parameters = sum(p.numel() for p in torch_models.make(settings.model).parameters())
    raced.clear()
    step_torch.stop()
    return OnLink(rate, carried, latency, call, meeting, parameters, slowest, sent)


def _race(
    raced: dict[str, Contender], rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of a step in each round, and bytes that a rank sent in one, of each contender."""
    times: dict[str, list[float]] = {name: [] for name in raced}
    sent: dict[str, float] = {}
    for turn in range(rounds + _WARM_UP_TURNS):
        for name, contender in raced.items():
            hvd.allreduce(torch.zeros(1), name="start")
            before = _bytes_sent()
            taken = _timed(contender.take_turn)
            # Behind what may still wait in the queue of the link.
            hvd.allreduce(torch.zeros(1), name="end")
            if turn >= _WARM_UP_TURNS:
                times[name].append(taken / contender.steps)
                sent[name] = (_bytes_sent() - before) / contender.steps / hvd.local_size()
            elif turn == _WARM_UP_TURNS - 1:
                taken = hvd.broadcast_object(taken)
                contender.periods = max(1, min(_MOST_PERIODS, round(_TURN_SECONDS / taken)))
    return times, sent


def _bytes_sent() -> int:
    """Bytes that left this host so far, headers included."""
    counters = psutil.net_io_counters(pernic=True)
    return sum(counter.bytes_sent for counter in counters.values())


def main(settings: str, rate: str, path: str) -> None:
    """Measure on the ranks that were started; rank 0 writes ``path``."""
    measured = measure(Settings.from_dict(json.loads(settings)), json.loads(rate))
    launch = detect()
    if launch is None or launch.rank == 0:
        Path(path).write_text(json.dumps(asdict(measured)))


if __name__ == "__main__":
    main(*sys.argv[1:])
