"""TensorFlow: a ``tf.function`` over NumPy batches, made data-parallel by ``hvd.distribute``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

import hvdsync.tensorflow as hvd
from hvdsync.keras.callbacks import set_rate
from hvdsync.sync.keras_optimizer import sharing_of
from hvdsync.train import devices
from hvdsync.train.feed import Batch, Epoch, evaluation_batches
from hvdsync.train.keras_network import make_model, make_optimizer, seed_noise
from hvdsync.train.own_pace import Shared
from hvdsync.train.worker import Job, Observer, Tally, Worker, remembered

init, run_elastically = hvd.init, hvd.elastic.run


class TensorFlowWorker(Worker):
    """The model in TensorFlow, on the CPU or on the GPU of this rank."""

    guard: hvd.Guard

    def __init__(self, job: Job) -> None:
        config = job.config
        self._dataset = job.dataset
        self._device = pin_gpu(config.device)
        weights = job.network.initial_weights(config.seed)
        self.model = make_model(job.network, weights)
        self._seed = config.seed
        self.optimizer = make_optimizer(config)
        self._rate = 0.0
        # A checkpoint holds its slots, and is restored before the first step.
        self.optimizer.build(self.model.trainable_variables)
        self.guard = hvd.Guard(config.guard_every, config.on_nonfinite, config.on_divergence)
        compression = hvd.Compression.named(config.compression)
        self.model, self.optimizer = hvd.distribute(
            self.model,
            self.optimizer,
            compression=compression,
            update=config.rule,
            accumulate=config.accumulate,
            guard=self.guard,
        )
        # The broadcast above gave all ranks rank 0's.
        self.draw_own_noise(0)
        self._own = remembered(compression, self.optimizer)
        if job.network.dropout:
            self._own["random"] = hvd.RandomState(self.model)
        self._sums = [tf.Variable(0.0, dtype=tf.float64) for _ in range(2)]
        self._samples = 0
        batch = (
            tf.TensorSpec((None, *job.network.shape), tf.float32),
            tf.TensorSpec((None,), tf.int64),
        )
        self._train = tf.function(self._train_pass, (*batch, tf.TensorSpec((None,), tf.float32)))
        self._test = tf.function(self._test_pass, batch)

    def _train_pass(self, images: Any, labels: Any, weights: Any) -> None:
        self.guard.watch(images)
        with tf.GradientTape() as tape:
            logits = self.model(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_sum(losses * weights)
        variables = self.model.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self._count(logits, labels, losses, tf.cast(weights > 0, tf.float32))

    def _test_pass(self, images: Any, labels: Any) -> None:
        logits = self.model(images, training=False)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        self._count(logits, labels, losses, tf.ones_like(losses))

    def _count(self, logits: Any, labels: Any, losses: Any, counted: Any) -> None:
        right = tf.cast(tf.argmax(logits, 1) == labels, tf.float32)
        for total, values in zip(self._sums, (losses, right), strict=True):
            total.assign_add(tf.cast(tf.reduce_sum(values * counted), tf.float64))

    def train_epoch(
        self, epoch: Epoch, observer: Observer, sums: Sequence[float] | None = None
    ) -> Tally:
        self._reset(*(sums or ()))
        for i, batch in enumerate(epoch):
            if i % epoch.accumulate == 0:
                self._set_rate(observer.step_begins())
            self._step(batch)
            self._samples += epoch.own_samples[i]
            if observer.pass_ended():
                break
        return self.tally()

    def _step(self, batch: Batch) -> None:
        try:
            self._train(batch.images, batch.labels, batch.weights)
        except tf.errors.OpError:
            if self.guard.failure is not None:  # of which TensorFlow made an error of its own
                raise self.guard.failure from None
            raise
        self.guard.check(self.model, self.optimizer)

    def evaluate(self, indices: Any) -> Tally:
        self._reset()
        for images, labels in evaluation_batches(self._dataset, indices):
            self._test(images, labels)
            self._samples += len(labels)
        return self.tally()

    def _set_rate(self, rate: float) -> None:
        if rate != self._rate:
            set_rate(self.optimizer, rate, correct_momentum=True)
            self._rate = rate

    def _reset(self, loss: float = 0.0, right: float = 0.0, samples: float = 0) -> None:
        self._samples = int(samples)
        for total, value in zip(self._sums, (loss, right), strict=True):
            total.assign(value)

    def tally(self) -> Tally:
        loss, right = (float(total) for total in self._sums)
        return Tally(loss, right, self._samples)

    def sums(self) -> list[float]:
        return [*(float(total) for total in self._sums), self._samples]

    def checkpoint(self, directory: Any, **options: Any) -> hvd.Checkpoint:
        return hvd.Checkpoint(directory, **options)

    def state(self) -> Mapping[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, **self._own}

    def elastic_state(self, **attributes: Any) -> hvd.elastic.TensorFlowKerasState:
        return hvd.elastic.TensorFlowKerasState(self.model, self.optimizer, **attributes)

    def draw_own_noise(self, step: int) -> None:
        seed_noise(self.model, self._seed, step)

    def synchronize_replicas(self) -> None:
        self.optimizer.synchronize_replicas()

    @property
    def shared(self) -> Shared | None:
        steps = sharing_of(self.optimizer).local_steps  # type: ignore[union-attr]
        return getattr(steps, "shared", None)

    @property
    def waited_seconds(self) -> float:
        return self.optimizer.waited_seconds  # type: ignore[no-any-return]

    @property
    def device(self) -> str:
        return self._device


def pin_gpu(wanted: Any) -> str:
    """Let TensorFlow see this rank's GPU only, or none; gives the device's name, for people.

    Collective; before TensorFlow's first operation. Raises ``HvdsyncError`` as ``devices.agree``.
    """
    gpus = tf.config.list_physical_devices("GPU")
    device = devices.choose(wanted, len(gpus))
    mine = [] if device.gpu is None else [gpus[device.gpu]]
    tf.config.set_visible_devices(mine, "GPU")
    for gpu in mine:
        tf.config.experimental.set_memory_growth(gpu, True)
    devices.agree(wanted, device)
    if mine:
        return str(tf.config.experimental.get_device_details(mine[0]).get("device_name", "GPU"))
    return "CPU"


worker = TensorFlowWorker
