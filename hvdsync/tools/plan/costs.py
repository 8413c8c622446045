"""A model's name in; what a step of it and its compressions cost one core of this machine out.

Buckets are filled, compressed and taken back here as in training, after backward of each step, but
without a network: what would have come from other workers is what was sent, once for each.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple
from multiprocessing.synchronize import Barrier
from statistics import median
from types import SimpleNamespace
from typing import Any, TypeVar

from hvdsync.tools.bench import environment
from hvdsync.tools.plan.predict import Cost, Machine

T = TypeVar("T")

_WARM_UP_STEPS = 3
_LEAST, _MOST = 5, 50
# Of whatever is repeated, between those limits.
_SECONDS = 1.0
# What a worker's part costs is the difference between these.
_FEW, _MANY = 2, 6
_BLOCK_ELEMENTS = 2**20
_PATIENCE_SECONDS = 120


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Shapes of a model's parameters."""
    from hvdsync.tools.bench import torch_models

    return [tuple(parameter.shape) for parameter in torch_models.make(model).parameters()]


def measure(
    model: str,
    compressions: Sequence[str],
    compute: float | None = None,
    together: int = 1,
) -> Machine:
    """All costs, each worker on one thread; ``compute`` are seconds of a step where they are known.

    ``together`` workers measure at the same time, as that many on one host would compute, or one
    for each core here: they share caches and memory, and what looks like two of them may be one.
    """
    wanted = model, tuple(compressions), compute
    together = min(together, environment.cores())
    if together == 1:
        return _measure(*wanted)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        together, context, initializer=_meet_at, initargs=(context.Barrier(together),)
    ) as workers:
        started = [workers.submit(_measure, *wanted) for _ in range(together)]
        return _typical([one.result() for one in started])


def _typical(machines: Sequence[Machine]) -> Machine:
    """Of each cost the median."""
    costs = {
        name: Cost(*map(median, zip(*(astuple(one.costs[name]) for one in machines), strict=True)))
        for name in machines[0].costs
    }
    compute, copied, added = (
        median(getattr(one, name) for one in machines) for name in ("compute", "copied", "added")
    )
    return Machine(compute, costs, copied, added, machines[0].cores)


_meeting: Barrier | None = None


def _meet_at(barrier: Barrier) -> None:
    global _meeting
    _meeting = barrier


def _meet() -> None:
    """Wait for the others that measure, if there are any, so that all measure the same thing."""
    if _meeting is not None:
        _meeting.wait(_PATIENCE_SECONDS)


def _measure(model: str, compressions: Sequence[str], compute: float | None) -> Machine:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        training = _Training(model)
        _meet()
        alone = median(_repeat(lambda: _seconds_of(training.step)))
        _meet()
        copied, added = _memory()
        costs = {}
        for name in compressions:
            _meet()
            costs[name] = _cost(name, training, alone)
    finally:
        torch.set_num_threads(threads)
    return Machine(compute or alone, costs, copied, added, environment.cores())


class _Training:
    """Steps of a model that talk to nobody."""

    def __init__(self, model: str) -> None:
        import torch

        from hvdsync.tools.bench import torch_models

        net, batch = torch_models.make(model), torch_models.batch_for(model, seed=0)
        optimizer = torch.optim.SGD(net.parameters(), 1e-3)
        #: Takes one; the gradients stay.
        self.step = torch_models.training_step(net, optimizer, batch)
        #: In the order in which backward brings their gradients.
        self.parameters = list(reversed(list(net.parameters())))


def _memory() -> tuple[float, float]:
    """Seconds per byte of copying memory, and of adding it to other memory."""
    import torch

    one, other = torch.ones(_BLOCK_ELEMENTS), torch.ones(_BLOCK_ELEMENTS)
    nbytes = 4 * _BLOCK_ELEMENTS
    return _timed(lambda: one.copy_(other)) / nbytes, _timed(lambda: one.add_(other)) / nbytes


def _timed(function: Callable[[], object]) -> float:
    return median(_repeat(lambda: _seconds_of(function)))


def _repeat(measure: Callable[[], T]) -> list[T]:
    """What it gives, again and again after some times to warm up."""
    found: list[T] = []
    started = time.perf_counter()
    while len(found) < _WARM_UP_STEPS + _LEAST or (
        time.perf_counter() - started < _SECONDS and len(found) < _MOST
    ):
        found.append(measure())
    return found[_WARM_UP_STEPS:]


def _seconds_of(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _cost(name: str, training: _Training, alone: float) -> Cost:
    """Per byte of gradients, over the buckets of a model whose step takes so many seconds alone."""
    before, after_few, nbytes = _exchange(name, training, _FEW)
    _, after_many, _ = _exchange(name, training, _MANY)
    before, after_few, after_many = (alone * part for part in (before, after_few, after_many))
    per_worker = max(after_many - after_few, 0.0) / (_MANY - _FEW)
    after = max(after_few - _FEW * per_worker, 0.0)
    return Cost(before / nbytes, after / nbytes, per_worker / nbytes)


class _Alike:
    """Horovod's operations among workers that all have what this one has; nothing travels.

    What others would have written into memory is written in ``synchronize``, whose time is not
    this worker's.
    """

    Sum, Average = "sum", "average"

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.global_process_set = SimpleNamespace(size=lambda: workers)

    def allreduce_async_(self, tensor: Any, name: str, op: str, **more: Any) -> Callable[[], Any]:
        return lambda: tensor.mul_(self._workers) if op == self.Sum else tensor

    def allgather_async(self, tensor: Any, **more: Any) -> Callable[[], Any]:
        return lambda: tensor.repeat(self._workers)

    def alltoall_async(self, tensor: Any, **more: Any) -> Callable[[], Any]:
        return lambda: (tensor[:1].repeat(self._workers, 1), None)

    def synchronize(self, handle: Callable[[], Any]) -> Any:
        return handle()


def _exchange(name: str, training: _Training, workers: int) -> tuple[float, float, int]:
    """Time until all buckets have left, and after they have come; their bytes.

    Times are over that of the step just before, which the machine was as busy in.
    """
    import torch

    from hvdsync.sync.compression import torch_compression
    from hvdsync.sync.torch_reducer import make_flat_buckets
    from hvdsync.sync.torch_wire import Wire

    hvd = _Alike(workers)
    compressor = torch_compression(torch).named(name)
    wire = Wire(torch, hvd, "plan", compression=compressor, op=hvd.Average)
    parameters = training.parameters
    buckets = make_flat_buckets(torch, parameters, [str(i) for i in range(len(parameters))])

    def send_and_receive() -> tuple[float, float]:
        with torch.enable_grad():
            # Caches hold then what they hold in training.
            step = _seconds_of(training.step)
        started = time.perf_counter()
        for bucket in buckets:
            bucket.fill(torch, [parameters[i].grad for i in bucket.members])
            bucket.send(wire)
        before = time.perf_counter() - started
        started, waited = time.perf_counter(), wire.waited_seconds
        wire.finish([bucket.flight for bucket in buckets if bucket.flight])
        for bucket in buckets:
            bucket.receive(wire)
        wire.step_is_done()
        after = time.perf_counter() - started - (wire.waited_seconds - waited)
        return before / step, after / step

    with torch.no_grad():
        befores, afters = zip(*_repeat(send_and_receive), strict=True)
    nbytes = sum(bucket.outgoing.flat.nbytes for bucket in buckets)
    return median(befores), median(afters), nbytes
