"""A small training in one of the frameworks, on each rank, with a fault of ``tests.faults`` in it.

Arguments: torch, tensorflow or keras, and the folder of its checkpoints. Six steps; at each a guard
and a collective of its own ("of the user"), after every second one a checkpoint.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests import faults

STEPS = 6
FEATURES = 4
BATCH = 8

fault = faults.from_environment()


def batches(rank):
    rng = np.random.default_rng(rank)
    for step in range(1, STEPS + 1):
        x = rng.normal(size=(BATCH, FEATURES)).astype(np.float32)
        yield step, fault.in_batch(step, rank, x), x.sum(1, keepdims=True)


def train_torch(directory):
    import torch

    import hvdsync.torch as hvd

    hvd.init()
    rank = hvd.rank()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 8), hvd.SyncBatchNorm(8), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    guard = hvd.Guard(every=1)
    model, optimizer = hvd.distribute(model, optimizer, guard=guard)

    def variables():
        named = {n: t for n, t in model.state_dict().items() if t.dtype == torch.float32}
        for (name, _), state in zip(
            model.named_parameters(), optimizer.state.values(), strict=True
        ):
            named[f"momentum of {name}"] = state["momentum_buffer"]
        return named

    def of_the_user(value):
        hvd.allreduce(torch.from_numpy(value), name="of the user")

    with hvd.Checkpoint(directory, every=2) as checkpoint:
        for step, x, y in batches(rank):
            fault.before_step(step, rank)
            fault.reduces(step, rank, of_the_user, np.ones(3, np.float32))
            optimizer.zero_grad()
            loss = (model(torch.from_numpy(x)) - torch.from_numpy(y)).square().mean()
            loss.backward()
            optimizer.step()
            fault.after_step(
                step,
                rank,
                variables,
                lambda t: t.detach().numpy().copy(),
                lambda t, a: t.detach().copy_(torch.from_numpy(a)),
            )
            guard.check(model, optimizer)
            checkpoint.save(step, model=model, optimizer=optimizer)


def keras_model(keras, hvd):
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8),
            hvd.SyncBatchNormalization(),
            keras.layers.Dense(1),
        ]
    )


def keras_variables(model, optimizer):
    return {v.path: v for v in [*model.variables, *optimizer.variables]}


def train_tensorflow(directory):
    import keras
    import tensorflow as tf

    import hvdsync.tensorflow as hvd

    hvd.init()
    rank = hvd.rank()
    guard = hvd.Guard(every=1)
    model, optimizer = hvd.distribute(
        keras_model(keras, hvd), keras.optimizers.SGD(0.01, momentum=0.9), guard=guard
    )

    @tf.function
    def step_of(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def of_the_user(value):
        hvd.allreduce(tf.constant(value), name="of the user")

    with hvd.Checkpoint(directory, every=2) as checkpoint:
        for step, x, y in batches(rank):
            fault.before_step(step, rank)
            fault.reduces(step, rank, of_the_user, np.ones(3, np.float32))
            step_of(tf.constant(x), tf.constant(y))
            fault.after_step(
                step,
                rank,
                lambda: keras_variables(model, optimizer),
                lambda v: v.numpy().copy(),
                lambda v, a: v.assign(a),
            )
            guard.check(model, optimizer)
            checkpoint.save(step, model=model, optimizer=optimizer)


def train_keras(directory):
    import keras

    import hvdsync.keras as hvd

    hvd.init()
    rank = hvd.rank()
    model = keras_model(keras, hvd)
    model.compile(hvd.distribute(keras.optimizers.SGD(0.01, momentum=0.9)), "mse")

    class Faults(keras.callbacks.Callback):
        step = 0

        def on_train_batch_begin(self, batch, logs=None):
            self.step += 1
            fault.before_step(self.step, rank)
            fault.reduces(self.step, rank, of_the_user, np.ones(3, np.float32))

        def on_train_batch_end(self, batch, logs=None):
            fault.after_step(
                self.step,
                rank,
                lambda: keras_variables(model, model.optimizer),
                lambda v: keras.ops.convert_to_numpy(v).copy(),
                lambda v, a: v.assign(a),
            )

    def of_the_user(value):
        hvd.allreduce(keras.ops.convert_to_tensor(value), name="of the user")

    model.fit(
        ((x, y) for _, x, y in batches(rank)),
        steps_per_epoch=2,
        epochs=STEPS // 2,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            Faults(),
            hvd.callbacks.GuardCallback(every=1),
            hvd.callbacks.CheckpointCallback(directory),
        ],
    )


TRAIN = {"torch": train_torch, "tensorflow": train_tensorflow, "keras": train_keras}

if __name__ == "__main__":
    TRAIN[sys.argv[1]](Path(sys.argv[2]))
