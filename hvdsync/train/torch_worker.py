"""PyTorch: a plain loop over NumPy batches, made data-parallel by ``hvd.distribute``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional

import hvdsync.torch as hvd
from hvdsync.data.seeds import rank_seed
from hvdsync.train import devices
from hvdsync.train.config import TrainConfig
from hvdsync.train.feed import Epoch, evaluation_batches
from hvdsync.train.models import Array, Network
from hvdsync.train.own_pace import Shared
from hvdsync.train.worker import Job, Observer, Tally, Worker, remembered

init, run_elastically = hvd.init, hvd.elastic.run


class TorchNetwork(torch.nn.Module):
    """A :class:`Network` in PyTorch; images come as (B, H, W, C)."""

    def __init__(self, network: Network, weights: list[Array]) -> None:
        super().__init__()
        self.convolutions = torch.nn.ModuleList(
            torch.nn.Conv2d(layer.channels, layer.filters, layer.size, padding="same")
            for layer in network.convolutions
        )
        self.dense = torch.nn.ModuleList(
            torch.nn.Linear(layer.inputs, layer.units) for layer in network.dense
        )
        self.dropout = network.dropout
        with torch.no_grad():
            for parameter, array in zip(self.parameters(), weights, strict=True):
                order = {4: (3, 2, 0, 1), 2: (1, 0), 1: (0,)}[array.ndim]
                parameter.copy_(torch.from_numpy(array.transpose(order)))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits (B, classes) of images (B, H, W, C)."""
        # Channels last in memory, as the images are: neither this nor the way back copies.
        x = images.permute(0, 3, 1, 2)
        for convolution in self.convolutions:
            x = functional.max_pool2d(functional.relu(convolution(x)), 2)
        x = x.permute(0, 2, 3, 1).flatten(1)
        *hidden, last = self.dense
        for layer in hidden:
            x = functional.relu(layer(x))
            if self.dropout:
                x = functional.dropout(x, self.dropout, self.training)
        logits: torch.Tensor = last(x)
        return logits


def make_optimizer(config: TrainConfig, parameters: Any) -> torch.optim.Optimizer:
    """The plain optimizer that ``--optimizer`` names; its rate is set before each step."""
    if config.optimizer in ("sgd", "momentum"):
        return torch.optim.SGD(parameters, config.lr, config.momentum)
    # Epsilon as in Keras; the frameworks' defaults differ.
    if config.optimizer == "adam":
        return torch.optim.Adam(parameters, config.lr, eps=1e-7)
    return torch.optim.AdamW(parameters, config.lr, eps=1e-7, weight_decay=0.004)


class TorchWorker(Worker):
    """The model in PyTorch, on the CPU or on the GPU of this rank."""

    def __init__(self, job: Job) -> None:
        config = job.config
        self._dataset = job.dataset
        self._seed = config.seed
        device = devices.choose(config.device, torch.cuda.device_count())
        devices.agree(config.device, device)
        self._device = torch.device("cpu")
        if device.gpu is not None:
            self._device = torch.device("cuda", device.gpu)
            torch.cuda.set_device(self._device)
        model = TorchNetwork(job.network, job.network.initial_weights(config.seed))
        model.to(self._device, memory_format=torch.channels_last)
        self.guard = hvd.Guard(config.guard_every, config.on_nonfinite, config.on_divergence)
        compression = hvd.Compression.named(config.compression)
        self.model, self.optimizer = hvd.distribute(
            model,
            make_optimizer(config, model.parameters()),
            engine=config.engine,
            compression=compression,
            update=config.rule,
            accumulate=config.accumulate,
            guard=self.guard,
        )
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._samples = 0
        self._own = remembered(compression, self.optimizer)
        if job.network.dropout:
            self.draw_own_noise(0)
            self._own["random"] = hvd.RandomState()

    def train_epoch(
        self, epoch: Epoch, observer: Observer, sums: Sequence[float] | None = None
    ) -> Tally:
        self.model.train()
        loss, right, samples = sums or (0.0, 0.0, 0)
        self._sums.copy_(torch.tensor([loss, right], dtype=torch.float64))
        self._samples = int(samples)
        for i, batch in enumerate(epoch):
            if i % epoch.accumulate == 0:
                rate = observer.step_begins()
                for group in self.optimizer.param_groups:
                    group["lr"] = rate
            images, labels = self._on_device(batch.images), self._on_device(batch.labels)
            weights = self._on_device(batch.weights)
            logits = self.model(images)
            losses = functional.cross_entropy(logits, labels, reduction="none")
            (losses * weights).sum().backward()
            if (i + 1) % epoch.accumulate == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
            if epoch.own_samples[i]:
                self._count(logits, labels, losses)
            if observer.pass_ended():
                break
        return self.tally()

    def tally(self) -> Tally:
        loss, right = self._sums.tolist()
        return Tally(loss, right, self._samples)

    def sums(self) -> list[float]:
        return [*self._sums.tolist(), self._samples]

    def _count(self, logits: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor) -> None:
        with torch.no_grad():
            self._sums[0] += losses.sum()
            self._sums[1] += (logits.argmax(1) == labels).sum()
        self._samples += len(labels)

    def evaluate(self, indices: Any) -> Tally:
        self.model.eval()
        self._sums.zero_()
        self._samples = 0
        with torch.no_grad():
            for arrays in evaluation_batches(self._dataset, indices):
                images, labels = map(self._on_device, arrays)
                logits = self.model(images)
                losses = functional.cross_entropy(logits, labels, reduction="none")
                self._count(logits, labels, losses)
        return self.tally()

    def _on_device(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def checkpoint(self, directory: Any, **options: Any) -> hvd.Checkpoint:
        return hvd.Checkpoint(directory, **options)

    def state(self) -> Mapping[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, **self._own}

    def elastic_state(self, **attributes: Any) -> hvd.elastic.TorchState:
        return hvd.elastic.TorchState(model=self.model, optimizer=self.optimizer, **attributes)

    def draw_own_noise(self, step: int) -> None:
        torch.manual_seed(rank_seed(self._seed, step=step))

    def synchronize_replicas(self) -> None:
        self.optimizer.synchronize_replicas()  # type: ignore[attr-defined]

    @property
    def shared(self) -> Shared | None:
        return getattr(getattr(self.optimizer, "_local", None), "shared", None)

    @property
    def waited_seconds(self) -> float:
        return self.optimizer.waited_seconds  # type: ignore[attr-defined, no-any-return]

    @property
    def device(self) -> str:
        if self._device.type == "cpu":
            return "CPU"
        return torch.cuda.get_device_name(self._device)


worker = TorchWorker
