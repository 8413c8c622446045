"""Keras on either backend: ``model.fit``, made data-parallel by ``hvd.distribute(optimizer)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

import hvdsync.keras as hvd
from hvdsync.keras.callbacks import set_rate
from hvdsync.sync.keras_optimizer import sharing_of
from hvdsync.train import devices
from hvdsync.train.feed import EVALUATION_BATCH, Epoch
from hvdsync.train.keras_network import make_model, make_optimizer, noise_states, seed_noise
from hvdsync.train.own_pace import Shared
from hvdsync.train.worker import Job, Observer, Tally, Worker, remembered

init, run_elastically = hvd.init, hvd.elastic.run


class KerasWorker(Worker):
    """The model in Keras, on the CPU or on the GPU of this rank."""

    def __init__(self, job: Job) -> None:
        config = job.config
        self._dataset = job.dataset
        self._device = _pin_gpu(config.device)
        weights = job.network.initial_weights(config.seed)
        self.model = make_model(job.network, weights)
        self._seed = config.seed
        self.draw_own_noise(0)
        compression = hvd.Compression.named(config.compression)
        optimizer = hvd.distribute(
            make_optimizer(config),
            compression=compression,
            update=config.rule,
            accumulate=config.accumulate,
        )
        cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(
            optimizer=optimizer,
            loss=cross_entropy,
            # What reduces gradients cannot be compiled by XLA.
            jit_compile=False,
            # Weighted, so that samples which only stand in are not counted.
            weighted_metrics=[
                keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
                keras.metrics.SparseCategoricalCrossentropy(name="mean_loss", from_logits=True),
            ],
        )
        # Here, and not in the middle of a restore on rank 0 alone: what is built is broadcast.
        optimizer.build(self.model.trainable_variables)
        noise = noise_states(self.model)
        self._own = remembered(compression, optimizer)
        if noise:
            self._own["random"] = hvd.RandomState(self.model)
        self._guard = hvd.callbacks.GuardCallback(
            config.guard_every, config.on_nonfinite, config.on_divergence
        )
        self.guard = self._guard.guard
        self._callbacks: list[Any] = []
        if not config.elastic:
            broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0, "", noise)
            self._callbacks.append(broadcast)
        self._progress = _Progress(None, None, None)

    def train_epoch(
        self, epoch: Epoch, observer: Observer, sums: Sequence[float] | None = None
    ) -> Tally:
        self._progress = _Progress(epoch, observer, sums)
        if sums is not None:
            self._build_metrics()
        if epoch.passes == 0:
            self._progress.take_up(self.model)
            self._progress.logs = self.model.get_metrics_result()
            return self.tally()
        images, labels, weights = _arrays(epoch)
        self.model.fit(
            images,
            labels,
            sample_weight=weights,
            batch_size=epoch.batch_size,
            initial_epoch=epoch.number,
            epochs=epoch.number + 1,
            shuffle=False,
            callbacks=[*self._callbacks, self._guard, self._progress],
            verbose=0,
        )
        self._callbacks = []
        return self.tally()

    def _build_metrics(self) -> None:
        # Keras makes their variables when it first needs them, in the middle of the first step.
        classes = self.model.output_shape[-1]
        logits = keras.ops.zeros((1, classes))
        self.model.compute_metrics(None, np.zeros(1, np.int64), logits, np.ones(1, np.float32))
        self.model.reset_metrics()

    def tally(self) -> Tally:
        return _tally(self._progress.logs, self._progress.samples)

    def sums(self) -> list[float]:
        values = [float(keras.ops.convert_to_numpy(v)) for v in self.model.metrics_variables]
        return [self._progress.samples, *values]

    def evaluate(self, indices: Any) -> Tally:
        images, labels = self._dataset.test_batch(indices)
        logs = self.model.evaluate(
            images, labels, batch_size=EVALUATION_BATCH, verbose=0, return_dict=True
        )
        return _tally(logs, len(indices))

    def checkpoint(self, directory: Any, **options: Any) -> hvd.Checkpoint:
        return hvd.Checkpoint(directory, **options)

    def state(self) -> Mapping[str, Any]:
        # With its optimizer, since it is compiled.
        return {"model": self.model, **self._own}

    def elastic_state(self, **attributes: Any) -> hvd.elastic.KerasState:
        return hvd.elastic.KerasState(self.model, **attributes)

    def draw_own_noise(self, step: int) -> None:
        seed_noise(self.model, self._seed, step)

    def synchronize_replicas(self) -> None:
        self.model.optimizer.synchronize_replicas()

    @property
    def shared(self) -> Shared | None:
        steps = sharing_of(self.model.optimizer).local_steps  # type: ignore[union-attr]
        return getattr(steps, "shared", None)

    @property
    def waited_seconds(self) -> float:
        return self.model.optimizer.waited_seconds  # type: ignore[no-any-return]

    @property
    def device(self) -> str:
        return f"{self._device}, {keras.backend.backend()} backend"


class _Progress(keras.callbacks.Callback):
    """Sets the learning rate of each step and tells how far the epoch is."""

    def __init__(
        self, epoch: Epoch | None, observer: Observer | None, sums: Sequence[float] | None
    ) -> None:
        super().__init__()
        self.logs: Mapping[str, Any] = {}
        self.samples = 0
        self.ends_all_ranks = False
        self._epoch = epoch
        self._observer = observer
        self._sums = sums
        self._rate = 0.0

    def take_up(self, model: keras.Model) -> None:
        """Give the metrics what they had when the epoch was left."""
        if self._sums is None:
            return
        self.samples = int(self._sums[0])
        for variable, value in zip(model.metrics_variables, self._sums[1:], strict=True):
            variable.assign(value)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.take_up(self.model)  # Keras has just set them to 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        assert self._epoch is not None and self._observer is not None
        if batch % self._epoch.accumulate:
            return
        rate = self._observer.step_begins()
        if rate != self._rate:
            set_rate(self.model.optimizer, rate, correct_momentum=True)
            self._rate = rate

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert self._epoch is not None and self._observer is not None
        self.logs = logs or {}
        self.samples += self._epoch.own_samples[batch]
        if self._observer.pass_ended():
            self.model.stop_training = self.ends_all_ranks = True


def _arrays(epoch: Epoch) -> list[Any]:
    """Images, labels and weights of an epoch; cut into batches in order, they are its passes.

    Keras is given arrays, not a generator, out of which it takes batches much more slowly. A batch
    that is shorter and not the last is filled up with samples of weight 0.
    """
    parts = []
    for i, batch in enumerate(epoch):
        count = len(batch.labels)
        size = count if i + 1 == epoch.passes else epoch.batch_size
        filled = np.arange(size) % count
        # Keras divides the weighted sum of losses by the number of samples in the batch.
        weights = np.where(np.arange(size) < count, batch.weights[filled] * size, 0)
        parts.append((batch.images[filled], batch.labels[filled], weights.astype(np.float32)))
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


def _tally(logs: Mapping[str, Any], samples: int) -> Tally:
    if not logs:
        return Tally()
    return Tally(logs["mean_loss"] * samples, logs["accuracy"] * samples, samples)


def _pin_gpu(wanted: Any) -> str:
    if keras.backend.backend() == "tensorflow":
        from hvdsync.train.tensorflow_worker import pin_gpu

        return pin_gpu(wanted)
    import torch

    device = devices.choose(wanted, torch.cuda.device_count())
    devices.agree(wanted, device)
    if device.gpu is None:
        return "CPU"
    torch.cuda.set_device(device.gpu)
    return torch.cuda.get_device_name(device.gpu)


worker = KerasWorker
