"""What several test files of this folder need: equality over ranks, models and their data."""

import keras
import numpy as np

import hvdsync.keras as hvd
from tests.parallel.ranks import assert_equal_arrays_on_all_ranks, shard

# float32 keeps 24 bits; a step sums and averages in another order than one process does, and a few
# dozen steps carry that on. Weights here are of the order of 1.
CLOSE = {"rtol": 1e-4, "atol": 2e-6}


def values(variables):
    return [keras.ops.convert_to_numpy(v).copy() for v in variables]


def assert_equal_on_all_ranks(variables):
    """Bit for bit: each variable is that of every other rank."""
    assert_equal_arrays_on_all_ranks(values(variables))


def assert_close(variables, others):
    for found, expected in zip(values(variables), values(others), strict=True):
        np.testing.assert_allclose(found, expected, **CLOSE)


def data(samples=48, features=5, seed=0):
    """A learnable problem; batches of 12 divide by 1, 2, 3 and 4 ranks."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, features)).astype("float32")
    return x, np.tanh(x.sum(1, keepdims=True)).astype("float32")


def make_model(features=5, norm=False):
    layers = [keras.Input((features,)), keras.layers.Dense(7, "tanh")]
    layers += [keras.layers.BatchNormalization()] if norm else []
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    rng = np.random.default_rng(1)
    for v in model.trainable_variables:
        v.assign(rng.normal(size=v.shape, scale=0.5))
    return model


def fit(model, x, y, batch_size, epochs=3, **arguments):
    arguments = {"verbose": 0, "shuffle": False, **arguments}
    return model.fit(x, y, batch_size=batch_size, epochs=epochs, **arguments)


def fit_plain(optimizer, epochs=3, model=None, **compile_arguments):
    """One process, ordinary Keras, on whole global batches of 12."""
    model = make_model() if model is None else model
    model.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError(), **compile_arguments)
    fit(model, *data(), 12, epochs)
    return model


def fit_together(optimizer, epochs=3, model=None, callbacks=(), **compile_arguments):
    """All ranks, each on its part of the same batches."""
    model = make_model() if model is None else model
    model.compile(optimizer=optimizer, loss=keras.losses.MeanSquaredError(), **compile_arguments)
    fit(model, *shard(*data()), 12 // hvd.size(), epochs, callbacks=list(callbacks))
    return model
