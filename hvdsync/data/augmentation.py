"""In: images, their indices, seed and epoch. Out: the images, each shifted at random; what a sample
gets depends on nothing else, so it is the same at any world size and after any resume."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvdsync.data.arrays import Array
from hvdsync.data.order import Indices

# Of small images less: a shift must not take away what there is to see.
_MOST_PIXELS = 2
_SMALLEST_PART = 8


def sample_noise(length: int, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """64 random bits for each of ``length`` samples in ``epoch``: uint64 (length,).

    The raw words of a Philox stream of (seed, epoch), which NumPy keeps for ever, at the sample's
    index; another stream than that of the order of samples.
    """
    bits = np.random.Philox(np.random.SeedSequence(seed, spawn_key=(epoch, 1)))
    return np.asarray(bits.random_raw(length))


def shift_randomly(images: Array, noise: npt.NDArray[np.uint64]) -> Array:
    """Each image (B, H, W, C) moved by up to two pixels both ways, zeros where nothing was.

    ``noise``: uint64 (B,), one word per image; images of less than 16 pixels move by one, those of
    less than 8 not at all.
    """
    count, height, width, _ = images.shape
    most = min(_MOST_PIXELS, min(height, width) // _SMALLEST_PART)
    if most == 0:
        return images
    half, choices = np.uint64(32), np.uint64(2 * most + 1)
    down, right = (noise << half >> half) % choices, (noise >> half) % choices
    padded = np.pad(images, ((0, 0), (most, most), (most, most), (0, 0)))
    rows = _window(down, height)[:, :, np.newaxis]
    columns = _window(right, width)[:, np.newaxis, :]
    shifted: Array = padded[np.arange(count)[:, np.newaxis, np.newaxis], rows, columns]
    return shifted


def _window(starts: Any, size: int) -> Indices:
    return starts.astype(np.int64)[:, np.newaxis] + np.arange(size, dtype=np.int64)
