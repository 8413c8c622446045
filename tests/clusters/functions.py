"""Functions that the tests start on Spark and Ray."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def add(offset):
    import torch

    import hvdsync.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor(float(offset + hvd.rank())), op=hvd.Sum)
    return hvd.rank(), hvd.size(), total.item(), os.environ.get("HVDSYNC_TEST_WORD")


def fail(number):
    import torch

    import hvdsync.torch as hvd

    hvd.init()
    if hvd.rank() == 1:
        raise ValueError(f"rank 1 cannot divide {number}")
    hvd.allreduce(torch.zeros(1))


def shrink(folder):
    """Elastic: rank 1 dies once, in the fourth step, and the others go on."""
    import torch

    import hvdsync.torch as hvd

    hvd.init()
    state = hvd.elastic.TorchState(model=torch.nn.Linear(1, 1), step=0)

    @hvd.elastic.run
    def train(state):
        while state.step < 6:
            hvd.allreduce(torch.ones(1), name="one")
            died = Path(folder, "died")
            if state.step == 3 and hvd.rank() == 1 and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            state.step += 1
            state.commit()
        return hvd.rank(), hvd.size(), state.step

    return train(state)
