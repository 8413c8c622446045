"""The models of ``bench step`` in PyTorch: a name in; module, synthetic batch and loss out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hvdsync.tools.bench.models import MODELS

Batch = tuple[torch.Tensor, torch.Tensor]


def make(name: str, seed: int = 0) -> nn.Module:
    """The model ``name`` of ``MODELS``, with weights drawn from the seed."""
    torch.manual_seed(seed)
    return _MAKERS[name]()


def batch_for(name: str, seed: int) -> Batch:
    """Synthetic inputs and labels of one step of one rank."""
    model = MODELS[name]
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(model.classes, (model.batch_size,), generator=generator)
    if model.vocabulary:
        shape = (model.batch_size, *model.inputs)
        return torch.randint(model.vocabulary, shape, generator=generator), labels
    height_width_last = (*model.inputs[2:], *model.inputs[:2])
    shape = height_width_last if len(model.inputs) == 3 else model.inputs
    return torch.rand((model.batch_size, *shape), generator=generator), labels


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Cross entropy, the mean over the batch."""
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def training_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch
) -> Callable[[], None]:
    """What takes one step on the batch; the gradients stay."""

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    return step


def _dense(*sizes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, units in pairwise(sizes):
        layers += [nn.Linear(inputs, units), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class _Residual(nn.Module):
    def __init__(self, inputs: int, filters: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, filters, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(filters)
        self.second = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(filters)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != filters:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, filters, 1, stride, bias=False), nn.BatchNorm2d(filters)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.second_norm(self.second(torch.relu(self.first_norm(self.first(x)))))
        return torch.relu(inner + self.shortcut(x))


def _resnet18() -> nn.Module:
    """ResNet-18 (1512.03385) with the small first convolution that is usual for 32 x 32 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False)]
    layers += [nn.BatchNorm2d(64), nn.ReLU()]
    before = 64
    for filters, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [_Residual(before, filters, stride), _Residual(filters, filters, 1)]
        before = filters
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class _Transformer(nn.Module):
    """An encoder of four layers (1706.03762) that reads tokens and names a class."""

    def __init__(self, vocabulary: int, length: int, classes: int, width: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.tokens(x) + self.places).mean(1))  # type: ignore[no-any-return]


def _transformer() -> nn.Module:
    model = MODELS["transformer"]
    return _Transformer(model.vocabulary, model.inputs[0], model.classes)


_MAKERS: dict[str, Callable[[], Any]] = {
    "linear": lambda: _dense(784, 10),
    "mlp": lambda: _dense(784, 512, 512, 10),
    "deep": lambda: _dense(784, *[64] * 39, 10),
    "cnn": _cnn,
    "wide": lambda: _dense(784, 2800, 2800, 10),
    "resnet18": _resnet18,
    "transformer": _transformer,
}
