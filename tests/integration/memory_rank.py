"""A small training in one framework, on each rank; in the third step rank 1 runs out of memory.

Argument: torch, tensorflow or keras. It does so as models do: in the middle of the forward pass.
"""

from __future__ import annotations

import sys

import numpy as np

STEP, RANK = 3, 1
# More bytes than any machine has.
TOO_MANY = 2**30, 2**25
X, Y = np.ones((4, 5), np.float32), np.ones((4, 1), np.float32)


def train_torch():
    import torch

    import hvdsync.torch as hvd

    class Hungry(torch.nn.Linear):
        def forward(self, x):
            if hvd.rank() == RANK and self.step == STEP:
                x = x + torch.empty(TOO_MANY).sum()
            return super().forward(x)

    hvd.init()
    hungry = Hungry(8, 1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), hungry)
    model, optimizer = hvd.distribute(model, torch.optim.SGD(model.parameters(), 0.01))
    for step in range(1, 6):
        hungry.step = step
        optimizer.zero_grad()
        model(torch.from_numpy(X)).square().mean().backward()
        optimizer.step()


def hungry_net(rank):
    import keras

    class Hungry(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.step = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x):
            if rank != RANK:
                return x
            # Of no size before that step.
            rows = TOO_MANY[0] * keras.ops.cast(self.step == STEP, "int32")
            if keras.backend.backend() == "torch":
                return x + keras.ops.sum(keras.ops.ones((int(rows), TOO_MANY[1])))
            import tensorflow as tf

            return x + tf.reduce_sum(tf.ones(tf.stack([rows, TOO_MANY[1]])))

    hungry = Hungry()
    layers = [keras.layers.Dense(8), hungry, keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((5,)), *layers]), hungry


def train_tensorflow():
    import keras
    import tensorflow as tf

    import hvdsync.tensorflow as hvd

    hvd.init()
    net, hungry = hungry_net(hvd.rank())
    model, optimizer = hvd.distribute(net, keras.optimizers.SGD(0.01))

    @tf.function
    def train_step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(X)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for step in range(1, 6):
        hungry.step.assign(step)
        train_step()


def train_keras():
    import keras

    import hvdsync.keras as hvd

    hvd.init()
    model, hungry = hungry_net(hvd.rank())
    model.compile(hvd.distribute(keras.optimizers.SGD(0.01)), "mse", jit_compile=False)
    count = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: hungry.step.assign(batch + 1)
    )
    model.fit(
        np.repeat(X, 5, 0),
        np.repeat(Y, 5, 0),
        batch_size=4,
        verbose=0,
        callbacks=[count, hvd.callbacks.MetricAverageCallback()],
    )


{"torch": train_torch, "tensorflow": train_tensorflow, "keras": train_keras}[sys.argv[1]]()
