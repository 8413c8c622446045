"""Ranks of which one does not come to a collective, for the reason that it is told.

waiting_rank.py FRAMEWORK REASON: six steps with one reduction each; in the fourth the last rank has
its reason, or rank 0 calls a collective of its own. Keras's steps are those of ``fit``.
"""

import os
import signal
import sys

from hvdsync.errors import StalledRank

framework, reason = sys.argv[1:3]


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


def torch_steps():
    import torch

    import hvdsync.torch as hvd

    run(hvd, lambda name: hvd.allreduce(torch.ones(3), name=name))


def tensorflow_steps():
    import tensorflow as tf

    import hvdsync.tensorflow as hvd

    def reduce(name):
        # In a graph, since TensorFlow's eager operations forget their names.
        return tf.function(lambda part: hvd.allreduce(part, name=name))(tf.ones(3))

    run(hvd, reduce)


def keras_steps():
    import keras
    import numpy as np

    import hvdsync.keras as hvd

    class AtTheFourth(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3 and hvd.rank() == hvd.size() - 1:
                misbehave()

    hvd.init()
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile(hvd.distribute(keras.optimizers.SGD(0.1)), "mse")
    x = np.ones((24, 3), np.float32)
    model.fit(x, x[:, :2], 4, verbose=0, callbacks=[AtTheFourth()])
    hvd.shutdown()


def run(hvd, reduce):
    hvd.init()
    last = hvd.size() - 1
    for step in range(6):
        if step == 3 and reason == "condition":
            if hvd.rank() == 0:
                reduce("of_rank_0_alone")
        elif step == 3 and hvd.rank() == last:
            misbehave()
            continue
        reduce(f"loss_{step}")
    hvd.shutdown()


steps = {"torch": torch_steps, "tensorflow": tensorflow_steps, "keras": keras_steps}[framework]
if reason == "catch":
    reason = "spin"
    try:
        steps()
    except StalledRank as error:
        print(f"caught {error}")
        print(error.report)
        sys.exit(7)
else:
    steps()
