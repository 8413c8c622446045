"""Ranks of which one does not come to a collective, for the reason that it is told.

waiting_rank.py FRAMEWORK REASON: steps with one all-reduce each; from the third on the last rank
has its reason, or rank 0 calls a collective of its own.
"""

import os
import signal
import sys

import numpy as np

from hvdsync.errors import StalledRank

framework, reason = sys.argv[1:3]
if framework == "keras":
    import keras

    framework = keras.backend.backend()
    import hvdsync.keras as hvd
if framework == "torch":
    import torch

    import hvdsync.torch as ops

    def tensor(array):
        return torch.from_numpy(array)
else:
    import tensorflow as tf

    import hvdsync.tensorflow as ops

    def tensor(array):
        return tf.constant(array)


if sys.argv[1] != "keras":
    hvd = ops


def reduce(name):
    return ops.allreduce(tensor(np.ones(3, np.float32)), name=name)


def spin():
    while True:
        sum(range(100))


def misbehave():
    if reason == "raise":
        raise ValueError("rank 1's own mistake")
    if reason == "exit":
        sys.exit(3)
    if reason == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if reason == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if reason == "finish":
        sys.exit(0)
    if reason == "spin":
        spin()


def main():
    hvd.init()
    last = hvd.size() - 1
    for step in range(6):
        if step == 3 and reason == "condition":
            if hvd.rank() == 0:
                reduce("of rank 0 alone")
        elif step == 3 and hvd.rank() == last:
            misbehave()
            continue
        reduce(f"loss {step}")
    hvd.shutdown()


if reason == "catch":
    reason = "spin"
    try:
        main()
    except StalledRank as error:
        print("caught", type(error).__name__, error)
        print(error.report)
        sys.exit(7)
else:
    main()
