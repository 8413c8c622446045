"""One rank of ``bench startup``, run as a file: it imports no more of hvdsync than it is told to.

Takes the framework, ``hvdsync`` or ``raw``, and a folder; leaves there, by rank, the times (Unix)
at which it ran, had imported, was initialised and had taken a step.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def step_in_torch(hvd: Any, raw: bool) -> None:
    """Wrap a model and take its first step."""
    import torch

    model = torch.nn.Linear(784, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if raw:
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    else:
        model, optimizer = hvd.distribute(model, optimizer)
    model(torch.rand(8, 784)).sum().backward()
    optimizer.step()


def step_in_tensorflow(hvd: Any, raw: bool) -> None:
    """As :func:`step_in_torch`; both contenders run the same lines."""
    import tensorflow as tf

    weight = tf.Variable(tf.random.normal((784, 10)))
    hvd.broadcast_variables([weight], root_rank=0)

    @tf.function
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x @ weight)
        (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
        weight.assign_sub(0.01 * gradient)

    step(tf.random.normal((8, 784)))


_STEPS: dict[str, Callable[[Any, bool], None]] = {
    "torch": step_in_torch,
    "tensorflow": step_in_tensorflow,
}


def main(framework: str, which: str, folder: str) -> None:
    """Come to the first step."""
    marks = [time.time()]
    import_module(framework)
    raw = which == "raw"
    hvd = import_module(f"{'horovod' if raw else 'hvdsync'}.{framework}")
    marks.append(time.time())
    hvd.init()
    marks.append(time.time())
    _STEPS[framework](hvd, raw)
    marks.append(time.time())
    Path(folder, f"{hvd.rank()}.json").write_text(json.dumps(marks))
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
