"""In: NumPy arrays of images and labels. Out: a checked ``Dataset``, and batches of it as float32
NHWC with int64 labels, which is what the models of every framework start from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdsync.errors import DataError

Array = npt.NDArray[Any]
Pair = tuple[Array, Array]


@dataclass(frozen=True)
class Dataset:
    """A training and a test set, kept as stored; every rank holds the same one.

    ``x_train``, ``x_test``: (N, H, W) or (N, H, W, C), uint8 (0..255) or floating point (as the
    model is to see it). ``y_train``, ``y_test``: (N,) integers in 0..classes-1. ``image_shape``
    is (H, W, C).
    """

    name: str
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    classes: int
    image_shape: tuple[int, int, int]

    @property
    def train(self) -> Pair:
        """(images, labels) to train on."""
        return self.x_train, self.y_train

    @property
    def test(self) -> Pair:
        """(images, labels) to evaluate on."""
        return self.x_test, self.y_test

    def train_batch(self, indices: Any) -> Pair:
        """The training samples at ``indices``: float32 (B, H, W, C), int64 (B,)."""
        return to_float(self.x_train[indices]), self.y_train[indices].astype(np.int64)

    def test_batch(self, indices: Any) -> Pair:
        """The test samples at ``indices``: float32 (B, H, W, C), int64 (B,)."""
        return to_float(self.x_test[indices]), self.y_test[indices].astype(np.int64)


def to_float(images: Array) -> Array:
    """Images as float32 (B, H, W, C): uint8 divided by 255 into [0, 1], floats as they are."""
    if images.ndim == 3:
        images = images[..., np.newaxis]
    if images.dtype == np.uint8:
        return np.multiply(images, np.float32(1 / 255), dtype=np.float32)
    return images.astype(np.float32)


def make_dataset(
    name: str, x_train: Array, y_train: Array, x_test: Array, y_test: Array, *, source: str = ""
) -> Dataset:
    """A ``Dataset`` of the four arrays, once they were found to fit together.

    Labels of shape (N, 1) are taken as (N,). The number of classes is the largest training label
    plus one. Raises ``DataError`` that names the array (and ``source``, the file), what was found
    and what was expected.
    """
    where = source or name
    y_train, y_test = _flat(y_train), _flat(y_test)
    for part, images, labels in (("train", x_train, y_train), ("test", x_test, y_test)):
        _check_images(f"x_{part}", images, where)
        _check_labels(f"y_{part}", labels, len(images), where)
    if x_train.shape[1:] != x_test.shape[1:]:
        raise DataError(
            f"{where}: x_test holds images of shape {x_test.shape[1:]}, expected "
            f"{x_train.shape[1:]} as in x_train"
        )
    classes = int(y_train.max()) + 1
    if classes > len(y_train):
        raise DataError(
            f"{where}: y_train holds the label {classes - 1} in {len(y_train)} samples; expected "
            f"class numbers counted from 0: map the labels to 0..classes-1"
        )
    highest = int(y_test.max())
    if highest >= classes:
        raise DataError(
            f"{where}: y_test holds the label {highest}, expected at most {classes - 1}, the "
            f"largest label of y_train"
        )
    height, width, channels = (*x_train.shape[1:], 1)[:3]
    return Dataset(
        name, x_train, y_train, x_test, y_test, classes, (int(height), int(width), int(channels))
    )


def _flat(labels: Array) -> Array:
    return labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels


def _check_images(array: str, images: Array, where: str) -> None:
    if images.ndim not in (3, 4) or 0 in images.shape:
        raise DataError(
            f"{where}: {array} has shape {images.shape}, expected (N, H, W) or (N, H, W, C) "
            f"with no size of 0"
        )
    if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
        raise DataError(
            f"{where}: {array} has dtype {images.dtype}, expected uint8 (0..255, divided by 255 "
            f"when read) or a floating-point type (kept as it is)"
        )


def _check_labels(array: str, labels: Array, count: int, where: str) -> None:
    if labels.shape != (count,):
        raise DataError(
            f"{where}: {array} has shape {labels.shape}, expected ({count},), one "
            f"label for each image"
        )
    if not np.issubdtype(labels.dtype, np.integer):
        raise DataError(
            f"{where}: {array} has dtype {labels.dtype}, expected integers 0..classes-1"
        )
    lowest = int(labels.min())
    if lowest < 0:
        raise DataError(
            f"{where}: {array} holds the label {lowest}, expected labels from 0 upwards"
        )
