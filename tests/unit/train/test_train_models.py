"""One description of a network serves every framework: sizes and initial weights."""

from __future__ import annotations

import numpy as np
import pytest

from hvdsync.errors import HvdsyncError
from hvdsync.train.models import make_network


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("linear", [(784, 10), (10,)]),
        ("mlp", [(784, 256), (256,), (256, 128), (128,), (128, 10), (10,)]),
        (
            "cnn",
            [
                (3, 3, 1, 16),
                (16,),
                (3, 3, 16, 32),
                (32,),
                (7 * 7 * 32, 64),
                (64,),
                (64, 10),
                (10,),
            ],
        ),
    ],
)
def test_shapes_of_weights(name: str, shapes: list[tuple[int, ...]]) -> None:
    weights = make_network(name, (28, 28, 1), 10).initial_weights(0)
    assert [w.shape for w in weights] == shapes
    assert {w.dtype for w in weights} == {np.dtype(np.float32)}


def test_the_seed_decides_the_weights() -> None:
    network = make_network("mlp", (28, 28, 1), 10)
    first, again, other = (network.initial_weights(seed) for seed in (3, 3, 4))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert not (first[0] == other[0]).all()


def test_kernels_keep_the_variance_of_the_signal_and_biases_are_zero() -> None:
    kernel, bias = make_network("mlp", (28, 28, 1), 10).initial_weights(0)[:2]
    limit = np.sqrt(6 / (784 + 256))
    assert np.abs(kernel).max() <= limit
    assert kernel.std() == pytest.approx(limit / np.sqrt(3), rel=0.01)
    assert not bias.any()


def test_only_the_last_layer_gives_plain_sums() -> None:
    dense = make_network("mlp", (5, 7, 3), 4).dense
    assert [layer.relu for layer in dense] == [True, True, False]
    assert (dense[0].inputs, dense[-1].units) == (105, 4)


def test_images_that_vanish_in_the_convolutions_are_refused() -> None:
    assert make_network("cnn", (4, 5, 1), 2).dense[0].inputs == 32
    with pytest.raises(HvdsyncError, match=r"images of 3 x 8 pixels .* at least 4 each way"):
        make_network("cnn", (3, 8, 1), 2)
