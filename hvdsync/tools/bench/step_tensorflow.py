"""The contenders of ``bench step`` in TensorFlow: a model's name in, a training step of each out.

Loops with a tape, and Keras's own step of ``fit``, each with a model of its own.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

import hvdsync.keras
import hvdsync.tensorflow as hvd
from hvdsync.comm import horovod
from hvdsync.guard.watch import rendezvous
from hvdsync.tools.bench import keras_models
from hvdsync.tools.bench.contenders import COMPUTE, HVDSYNC, RAW, Contender

IN_FIT = ", in fit"
MIRRORED = "MultiWorkerMirroredStrategy"


_mirrored: Any = None


def start() -> None:
    """Start Horovod and, on one host, the strategy of TensorFlow beside it."""
    global _mirrored
    hvd.init()
    if 1 < hvd.size() == hvd.local_size():
        _mirrored = _mirrored_strategy()


def _mirrored_strategy() -> Any:
    # Before TensorFlow does anything, and so not over TensorFlow: ranks ask the launcher.
    basics = horovod.load("tensorflow").mpi_ops._basics
    ports = _free_ports(hvd.size()) if hvd.rank() == 0 else None
    told = rendezvous.tell_all(basics, hvd.rank(), hvd.size(), {"ports": ports})
    if told is None:
        return None
    cluster = {"worker": [f"127.0.0.1:{port}" for port in told["ports"]]}
    task = {"type": "worker", "index": hvd.rank()}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    finally:
        del os.environ["TF_CONFIG"]


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def stop() -> None:
    """End it."""
    hvd.shutdown()


@contextmanager
def contenders(name: str, lr: float) -> Iterator[dict[str, Contender]]:
    """By name, all from the same weights."""
    batch = keras_models.batch_for(name, seed=hvd.rank())
    made = {COMPUTE: _loop(name, batch, lr, lambda tape, model: tape)}
    made[HVDSYNC] = _loop(name, batch, lr, lambda tape, model: hvd.DistributedGradientTape(tape))
    if hvd.size() > 1:
        raw: Any = horovod.load("tensorflow")
        made[RAW] = _loop(name, batch, lr, lambda tape, model: raw.DistributedGradientTape(tape))
    if _mirrored is not None:
        made[MIRRORED] = _of_strategy(name, batch, lr)
    made[COMPUTE + IN_FIT] = _fit(name, batch, lr, keras.Model, lambda optimizer: optimizer)
    made[HVDSYNC + IN_FIT] = _fit(name, batch, lr, keras.Model, hvdsync.keras.distribute)
    if hvd.size() > 1:
        made[RAW + IN_FIT] = _fit(name, batch, lr, _raw_model(), lambda optimizer: optimizer)
    yield made


def _loss() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _sgd(lr: float) -> Any:
    return keras.optimizers.SGD(lr, momentum=0.9)


def _loop(
    name: str, batch: keras_models.Batch, lr: float, wrapped: Callable[[Any, Any], Any]
) -> Contender:
    model, optimizer, loss = keras_models.make(name), _sgd(lr), _loss()
    optimizer.build(model.trainable_variables)
    # Horovod's own tape looks for what Keras's variables no longer have.
    variables = [v.value for v in model.trainable_variables]
    inputs, labels = (tf.constant(part) for part in batch)

    @tf.function
    def train() -> None:
        with tf.GradientTape() as tape:
            value = loss(labels, model(inputs, training=True))
        gradients = wrapped(tape, model).gradient(value, variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return Contender(lambda: train())


def _of_strategy(name: str, batch: keras_models.Batch, lr: float) -> Contender:
    with _mirrored.scope():
        model, optimizer = keras_models.make(name), _sgd(lr)
        optimizer.build(model.trainable_variables)
    # Its gradients are summed over workers.
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    samples = len(batch[1]) * hvd.size()
    inputs, labels = (tf.constant(part) for part in batch)

    def train() -> None:
        with tf.GradientTape() as tape:
            value = loss(labels, model(inputs, training=True)) / samples
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def on_all() -> None:
        _mirrored.run(train)

    return Contender(lambda: on_all())


def _fit(
    name: str,
    batch: keras_models.Batch,
    lr: float,
    kind: Any,
    wrapped: Callable[[Any], Any],
) -> Contender:
    built = keras_models.make(name)
    model = kind(built.inputs, built.outputs)
    model.compile(wrapped(_sgd(lr)), _loss())
    data = iter(tf.data.Dataset.from_tensors(batch).cache().repeat())
    model.make_train_function()
    step = model.train_function

    def train() -> None:
        step(data)

    return Contender(train)


def _raw_model() -> Any:
    raw: Any = horovod.load("tensorflow")

    class RawModel(keras.Model):  # type: ignore[misc]
        """Horovod's tape in Keras's step: its own optimizer for Keras does not run on Keras 3."""

        def train_step(self, data: Any) -> Any:
            inputs, labels = data
            with tf.GradientTape() as tape:
                value = self.compute_loss(inputs, labels, self(inputs, training=True))
            tape = raw.DistributedGradientTape(tape)
            gradients = tape.gradient(value, [v.value for v in self.trainable_variables])
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": value}

    return RawModel
