"""What several test files of this folder need: equality over ranks, models and their batches."""

import keras
import numpy as np
import tensorflow as tf

from tests.parallel.ranks import assert_equal_arrays_on_all_ranks

# float32 keeps 24 bits; a step sums and averages in another order than one process does, and a few
# dozen steps carry that on. Weights here are of the order of 1.
CLOSE = {"rtol": 1e-4, "atol": 2e-6}


def values(variables):
    return [np.array(v.numpy()) for v in variables]


def assert_equal_on_all_ranks(variables):
    """Bit for bit: each variable is that of every other rank."""
    assert_equal_arrays_on_all_ranks(values(variables))


def batches(count, size=12, features=5, seed=0):
    """Global batches of a learnable problem; ``size`` divides by 1, 2, 3 and 4."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        x = rng.normal(size=(size, features)).astype("float32")
        yield x, np.tanh(x.sum(1, keepdims=True)).astype("float32")


def make_model(features=5):
    model = keras.Sequential(
        [keras.Input((features,)), keras.layers.Dense(7, "tanh"), keras.layers.Dense(1)]
    )
    rng = np.random.default_rng(1)
    for v in model.variables:
        v.assign(rng.normal(size=v.shape, scale=0.5))
    return model


def loss_of(model, x, y):
    return tf.reduce_mean(tf.square(tf.cast(model(x, training=True), y.dtype) - y))


def train_plain(model, optimizer, data):
    """One process, ordinary TensorFlow, on whole global batches."""
    for x, y in data:
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
