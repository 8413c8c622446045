"""Compressed gradients of Keras models, on both backends, through ``fit``."""

import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from tests.parallel.cases import matrix_but
from tests.parallel.keras.helpers import assert_equal_on_all_ranks
from tests.parallel.ranks import shard
from tests.parallel.wire_bytes import TORCH_FLAGS, sent_bytes

ALL = ["none", "fp16", "bf16", "onebit", "topk:0.05", "powersgd:2", "powersgd:2,3"]


@pytest.mark.parametrize("name", matrix_but(["bf16", "topk:0.05", "powersgd:2,3"], ALL))
def test_fit_sends_the_bytes_of_the_formula_and_ranks_stay_equal(name):
    model = keras.Sequential(
        [keras.Input((40,)), keras.layers.Dense(60, "tanh"), keras.layers.Dense(3)]
    )
    random = np.random.default_rng(0)
    x, y = random.normal(size=(96, 40)).astype("f"), random.normal(size=(96, 3)).astype("f")
    optimizer = hvd.distribute(keras.optimizers.SGD(0.05), compression=hvd.Compression.named(name))
    model.compile(optimizer, "mse", jit_compile=False)
    x, y = shard(x, y)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    steps, epochs = len(x) // 8, 6
    history = model.fit(x, y, 8, epochs=epochs, verbose=0, callbacks=callbacks).history["loss"]
    assert history[-1] < 0.9 * history[0]
    assert_equal_on_all_ranks(model.variables)
    if hvd.size() > 1:
        flags = TORCH_FLAGS if keras.backend.backend() == "torch" else 0
        assert optimizer.sent_bytes == sent_bytes(name, hvd.size(), steps * epochs, flags)


def test_saved_models_know_nothing_of_compression(tmp_path):
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(60)])
    optimizer = hvd.distribute(keras.optimizers.SGD(0.1), compression=hvd.Compression.onebit)
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(np.ones((8, 40)), np.ones((8, 60)), 8, verbose=0)
    names = [variable.path for variable in model.optimizer.variables]
    path = tmp_path / f"{hvd.rank()}.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer).__name__ == "SGD"
    assert not hasattr(loaded.optimizer, "sent_bytes")
    assert [variable.path for variable in loaded.optimizer.variables] == names
