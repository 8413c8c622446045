"""In: the name of a data set ("mnist", "synthetic") or the path of the user's own arrays.
Out: a checked ``Dataset`` in memory, the same on every rank."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np

from hvdsync.data.arrays import Array, Dataset, make_dataset
from hvdsync.errors import DataError

ARRAYS = ("x_train", "y_train", "x_test", "y_test")


def load(
    name: str | Path,
    *,
    directory: Path | str | None = None,
    progress: bool = True,
    seed: int = 0,
    train_size: int = 8192,
    test_size: int = 2048,
    image_shape: tuple[int, int, int] = (28, 28, 1),
    classes: int = 10,
) -> Dataset:
    """The data set called ``name``.

    - "mnist": see ``hvdsync.data.mnist.load``; ``directory`` and ``progress`` are for it.
    - "synthetic": see ``synthetic``; ``seed``, sizes, ``image_shape`` and ``classes`` are for it.
    - a path: see ``load_path``. A folder that is called like one of the names is written "./mnist".

    Raises ``DataError``. Between ranks nothing travels.
    """
    if name == "mnist":
        from hvdsync.data import mnist

        return mnist.load(directory, progress)
    if name == "synthetic":
        return synthetic(
            seed=seed,
            train_size=train_size,
            test_size=test_size,
            image_shape=image_shape,
            classes=classes,
        )
    return load_path(name)


def synthetic(
    *,
    seed: int = 0,
    train_size: int = 8192,
    test_size: int = 2048,
    image_shape: tuple[int, int, int] = (28, 28, 1),
    classes: int = 10,
) -> Dataset:
    """Noisy copies of one random image per class, uint8 (N, H, W, C): a linear model learns them.

    The same ``seed`` and sizes give the same arrays on every rank. Raises ``DataError`` for a size
    below 1, or fewer training samples than classes.
    """
    if min(train_size, test_size, classes, *image_shape) < 1 or train_size < classes:
        raise DataError(
            f"synthetic: found sizes {train_size} and {test_size}, image shape {image_shape}, "
            f"{classes} classes; expected all positive and a training sample for each class"
        )
    generator = np.random.Generator(np.random.Philox(seed))
    prototypes = generator.integers(64, 192, (classes, *image_shape), dtype=np.uint8)

    def part(size: int) -> tuple[Array, Array]:
        labels = (np.arange(size) % classes).astype(np.int64)
        generator.shuffle(labels)
        # As wide as the contrast of the prototypes, which lie 64 from either end of uint8.
        noise = generator.integers(0, 128, (size, *image_shape), dtype=np.uint8)
        return prototypes[labels] + noise - np.uint8(64), labels

    x_train, y_train = part(train_size)
    x_test, y_test = part(test_size)
    return make_dataset("synthetic", x_train, y_train, x_test, y_test)


def load_path(path: Path | str) -> Dataset:
    """The user's own x_train, y_train, x_test, y_test: an ``.npz``, or a folder of NAME.npy files.

    Images are (N, H, W) or (N, H, W, C), uint8 or floating point; labels (N,) integers from 0.
    Files of a folder are mapped, not read, so the ranks of a node share their memory. Raises
    ``DataError`` that names the file and the array, what was found and what was expected. Pickled
    objects are refused.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        arrays = [_read(path / f"{name}.npy") for name in ARRAYS]
    elif path.is_file() and path.suffix == ".npz":
        arrays = _read_npz(path)
    elif path.exists():
        raise DataError(f"{path}: expected a folder of {_names('.npy')}, or an .npz file")
    else:
        raise DataError(
            f"{path}: no such data set; expected mnist, synthetic, an .npz file with {_names()}, "
            f"or a folder with {_names('.npy')}"
        )
    return make_dataset(path.stem, *arrays, source=str(path))


def _names(ending: str = "") -> str:
    return ", ".join(name + ending for name in ARRAYS)


def _read(path: Path) -> Array:
    if not path.is_file():
        raise DataError(f"{path}: not there; expected {_names('.npy')} in the folder")
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path}: not a plain NumPy array: {error}") from error
    return array


def _read_npz(path: Path) -> list[Array]:
    try:
        # Opened here: of a damaged archive NumPy would leave its own stream open.
        with path.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"{path}: found a single array, expected an .npz of {_names()}")
            lacking = [name for name in ARRAYS if name not in archive]
            if lacking:
                raise DataError(
                    f"{path}: no array {', '.join(lacking)}; found {', '.join(archive) or 'none'}, "
                    f"expected {_names()}"
                )
            return [_member(path, archive, name) for name in ARRAYS]
    except (ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path}: not a whole .npz file: {error}") from error


def _member(path: Path, archive: np.lib.npyio.NpzFile, name: str) -> Array:
    try:
        array: Array = archive[name]
    except ValueError as error:
        raise DataError(f"{path}: {name} is not a plain NumPy array: {error}") from error
    return array
