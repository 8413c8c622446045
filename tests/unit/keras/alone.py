"""One process that nobody launched and that never calls init: what is wrapped equals what is not.

Run by ``test_alone.py`` on each backend; every check raises when it does not hold.
"""

import sys

import keras
import numpy as np

import hvdsync.keras as hvd

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda: keras.optimizers.Adam(0.02, global_clipnorm=0.1),
    "adamw": lambda: keras.optimizers.AdamW(0.02, gradient_accumulation_steps=2),
    "muon": lambda: keras.optimizers.Muon(0.02),
    "ema": lambda: keras.optimizers.RMSprop(0.02, use_ema=True, ema_overwrite_frequency=2),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)),
}


def trained(optimizer, callbacks):
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), keras.layers.Dense(6, "relu"), keras.layers.Dropout(0.3)]
    model = keras.Sequential([*layers, keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(optimizer, "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 4)).astype("float32")
    y = x.sum(1, keepdims=True)
    history = model.fit(
        x, y, batch_size=6, epochs=3, verbose=0, callbacks=callbacks, validation_split=0.25
    )
    variables = model.variables + model.optimizer.variables
    values = [keras.ops.convert_to_numpy(v).tobytes() for v in variables]
    return values, history.history


def check_training():
    for kind, make in OPTIMIZERS.items():
        plain, plain_history = trained(make(), [])
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ]
        wrapped, history = trained(hvd.distribute(make()), callbacks)
        assert wrapped == plain, kind
        assert history == plain_history, kind


def check_values():
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (0, 1, 0, 1)
    value = np.array([1.0, 2.0], "float32")
    for found in (
        hvd.allreduce(value),
        hvd.allgather(value),
        hvd.broadcast(value, 0),
        hvd.reducescatter(value),
    ):
        assert keras.ops.convert_to_numpy(found).tolist() == [1.0, 2.0]
    assert hvd.broadcast_object({"a": 1}) == {"a": 1}
    assert hvd.allgather_object(1) == [1]
    hvd.broadcast_variables([keras.Variable(1.0)], 0)


check_values()
check_training()
assert not hvd.is_initialized()
sys.exit(0)
