"""A model's name in; what a step of it and its compressions cost one core of this machine out.

Compressors run here as in training, on the model's own gradients, but without a network: what
would have come from other workers is what was sent, once for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from hvdsync.tools.bench import environment
from hvdsync.tools.plan.payload import Bucket, buckets_of
from hvdsync.tools.plan.predict import Cost, Machine

if TYPE_CHECKING:
    from hvdsync.sync.compression.torch_arrays import TorchArrays

_WARM_UP_STEPS = 3
_REPEATS = 5
_STEP_SECONDS = 1.0
_MOST_STEPS = 50
# What a worker's part costs is the difference between these.
_FEW, _MANY = 2, 6
_BLOCK_ELEMENTS = 2**20


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Shapes of a model's parameters."""
    from hvdsync.tools.bench import torch_models

    return [tuple(parameter.shape) for parameter in torch_models.make(model).parameters()]


def measure(model: str, compressions: Sequence[str], compute: float | None = None) -> Machine:
    """All costs, on one thread; ``compute`` are seconds of a step where they are known."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if compute is None:
            compute = _compute(model)
        copied, added = _memory()
        buckets = buckets_of(shapes_of(model))
        costs = {name: _cost(name, buckets) for name in compressions}
    finally:
        torch.set_num_threads(threads)
    return Machine(compute, costs, copied, added, environment.cores())


def _compute(model: str) -> float:
    """Median seconds of a training step that talks to nobody."""
    import torch

    from hvdsync.tools.bench import torch_models

    net, batch = torch_models.make(model), torch_models.batch_for(model, seed=0)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    times: list[float] = []
    while len(times) < _WARM_UP_STEPS + 2 or (
        sum(times) < _STEP_SECONDS and len(times) < _MOST_STEPS
    ):
        started = time.perf_counter()
        optimizer.zero_grad()
        torch_models.loss_of(net, batch).backward()
        optimizer.step()
        times.append(time.perf_counter() - started)
    return median(times[_WARM_UP_STEPS:])


def _memory() -> tuple[float, float]:
    """Seconds per byte of copying memory, and of adding it to other memory."""
    import torch

    one, other = torch.ones(_BLOCK_ELEMENTS), torch.ones(_BLOCK_ELEMENTS)
    nbytes = 4 * _BLOCK_ELEMENTS
    return _timed(lambda: one.copy_(other)) / nbytes, _timed(lambda: one.add_(other)) / nbytes


def _timed(function: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS + 1):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return median(times[1:])


def _cost(name: str, buckets: Sequence[Bucket]) -> Cost:
    """Per byte of gradients, over the buckets of a model."""
    import torch

    from hvdsync.sync.compression import NoneCompressor, torch_compression
    from hvdsync.sync.compression.torch_arrays import TorchArrays

    compressor = torch_compression(torch).named(name)
    nbytes = sum(bucket.nbytes for bucket in buckets)
    if compressor is NoneCompressor:
        return Cost(0.0, 0.0)
    xp = TorchArrays(torch)
    before = after_few = after_many = 0.0
    for bucket in buckets:
        few = _exchange(xp, compressor, bucket, _FEW)
        many = _exchange(xp, compressor, bucket, _MANY)
        before += (few[0] + many[0]) / 2
        after_few += few[1]
        after_many += many[1]
    per_worker = max(after_many - after_few, 0.0) / (_MANY - _FEW)
    after = max(after_few - _FEW * per_worker, 0.0)
    return Cost(before / nbytes, after / nbytes, per_worker / nbytes)


def _exchange(
    xp: TorchArrays, compressor: Any, bucket: Bucket, workers: int
) -> tuple[float, float]:
    """Seconds until the first collective of a bucket, and all that follows."""
    import torch

    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(bucket.elements, generator=generator)
    states = [
        {key: xp.variable(array, flat) for key, array in initial.items()}
        for initial in (compressor.initial_state(part, "float32") for part in bucket.parts)
    ]
    firsts, rests = [], []
    for _ in range(_REPEATS + 1):
        spent = 0.0
        started = time.perf_counter()
        exchange = compressor.exchange(xp, flat, bucket.parts, states, workers)
        wanted = next(exchange)
        firsts.append(time.perf_counter() - started)
        while True:
            answer = wanted.tensor
            if wanted.kind == "gather":
                answer = answer.reshape(1, -1).repeat(workers, 1)
            started = time.perf_counter()
            try:
                wanted = exchange.send(answer)
            except StopIteration:
                spent += time.perf_counter() - started
                break
            spent += time.perf_counter() - started
        rests.append(spent)
    return median(firsts[1:]), median(rests[1:])
