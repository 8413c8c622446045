"""In: names, folders, archives of arrays. Out: proof that right ones load, wrong ones are named."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdsync.data import load, to_float
from hvdsync.errors import DataError

Arrays = dict[str, Any]


def _arrays(**changes: Any) -> Arrays:
    arrays: Arrays = {
        "x_train": np.arange(6 * 4 * 5, dtype=np.uint8).reshape(6, 4, 5),
        "y_train": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": np.ones((3, 4, 5), np.uint8),
        "y_test": np.array([2, 1, 0]),
    }
    arrays.update(changes)
    return {name: array for name, array in arrays.items() if array is not None}


def _as_npz(arrays: Arrays, folder: Path) -> Path:
    np.savez(folder / "own.npz", **arrays)
    return folder / "own.npz"


def _as_folder(arrays: Arrays, folder: Path) -> Path:
    (folder / "own").mkdir()
    for name, array in arrays.items():
        np.save(folder / "own" / f"{name}.npy", array)
    return folder / "own"


both = pytest.mark.parametrize("store", [_as_npz, _as_folder])
Store = Callable[[Arrays, Path], Path]


@both
def test_own_arrays_are_kept_as_stored(store: Store, tmp_path: Path) -> None:
    arrays = _arrays()
    data = load(str(store(arrays, tmp_path)))
    for name, array in arrays.items():
        np.testing.assert_array_equal(getattr(data, name), array)
        assert getattr(data, name).dtype == array.dtype
    assert (data.name, data.classes, data.image_shape) == ("own", 3, (4, 5, 1))


@both
def test_colour_floats_and_a_column_of_labels_load(store: Store, tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    arrays = _arrays(
        x_train=generator.normal(size=(6, 4, 5, 3)),
        x_test=generator.normal(size=(3, 4, 5, 3)),
        y_train=np.array([[0], [1], [2], [0], [1], [2]], np.uint8),
    )
    data = load(store(arrays, tmp_path))
    assert data.image_shape == (4, 5, 3)
    images, labels = data.train_batch(np.array([4, 1]))
    np.testing.assert_array_equal(images, arrays["x_train"][[4, 1]].astype(np.float32))
    assert (labels.tolist(), labels.dtype) == ([1, 1], np.int64)


WRONG: dict[str, tuple[Arrays, str, str]] = {
    "flat images": (
        {"x_train": np.zeros((6, 20), np.uint8)},
        "x_train",
        r"\(6, 20\).*\(N, H, W\)",
    ),
    "no images": ({"x_test": np.zeros((0, 4, 5), np.uint8)}, "x_test", r"\(0, 4, 5\)"),
    "integer images": ({"x_train": np.zeros((6, 4, 5), np.int64)}, "x_train", "int64.*uint8"),
    "other size": ({"x_test": np.zeros((3, 5, 4), np.uint8)}, "x_test", r"\(5, 4\).*\(4, 5\)"),
    "one label short": ({"y_train": np.zeros(5, int)}, "y_train", r"\(5,\).*\(6,\)"),
    "one-hot": ({"y_test": np.zeros((3, 3), int)}, "y_test", r"\(3, 3\).*\(3,\)"),
    "float labels": ({"y_test": np.zeros(3)}, "y_test", "float64.*integers"),
    "negative label": ({"y_train": np.array([0, 1, -1, 0, 1, 2])}, "y_train", "-1"),
    "unknown label": ({"y_test": np.array([0, 1, 3])}, "y_test", "label 3.*at most 2"),
    "identifiers": ({"y_train": np.array([0, 1, 900, 0, 1, 2])}, "y_train", "900"),
    "not there": ({"y_train": None}, "y_train", "x_train, y_train|x_train.npy, y_train.npy"),
    "objects": ({"x_test": np.array([{}, 1, 2], object)}, "x_test", "not a plain NumPy array"),
}


@both
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arrays_are_refused_by_file_and_name(case: str, store: Store, tmp_path: Path) -> None:
    changes, array, message = WRONG[case]
    path = store(_arrays(**changes), tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        load(path)
    assert str(path) in str(caught.value)
    assert array in str(caught.value)


@pytest.mark.parametrize("name", ["own.npz", "own/x_train.npy"])
def test_damaged_files_are_named(name: str, tmp_path: Path) -> None:
    path = _as_npz(_arrays(), tmp_path)
    folder = _as_folder(_arrays(), tmp_path)
    whole = (tmp_path / name).read_bytes()
    for damage in (whole[: len(whole) // 2], b"", b"junk"):
        (tmp_path / name).write_bytes(damage)
        with pytest.raises(DataError, match=str(tmp_path / name)):
            load(path if name.endswith("npz") else folder)


def test_a_flipped_bit_in_an_archive_is_noticed(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "own.npz", **_arrays())
    whole = (tmp_path / "own.npz").read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 4
        (tmp_path / "own.npz").write_bytes(damaged)
        try:
            data = load(tmp_path / "own.npz")
        except DataError as error:
            assert str(tmp_path / "own.npz") in str(error)
        else:  # the bit was in a field that says nothing about the arrays
            np.testing.assert_array_equal(data.x_train, _arrays()["x_train"])


def test_a_single_array_under_the_name_of_an_archive_is_named(tmp_path: Path) -> None:
    with (tmp_path / "own.npz").open("wb") as stream:
        np.save(stream, np.zeros(3))
    with pytest.raises(DataError, match=r"own\.npz: found a single array"):
        load(tmp_path / "own.npz")


def test_an_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"imagenet: no such.*mnist, synthetic.*x_train"):
        load("imagenet")
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(DataError, match=r"data\.csv: expected a folder"):
        load(tmp_path / "data.csv")


def test_synthetic_is_the_same_for_the_same_seed_only() -> None:
    one, again, other = (
        load("synthetic", seed=seed, train_size=50, test_size=20) for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(one.x_train, again.x_train)
    np.testing.assert_array_equal(one.y_test, again.y_test)
    assert not np.array_equal(one.x_train, other.x_train)


def test_synthetic_classes_can_be_learned_from_the_training_part() -> None:
    data = load(
        "synthetic", train_size=300, test_size=101, image_shape=(6, 5, 2), classes=7, seed=11
    )
    assert (data.x_train.shape, data.x_train.dtype) == ((300, 6, 5, 2), np.uint8)
    assert (len(data.y_test), data.classes, data.image_shape) == (101, 7, (6, 5, 2))
    train, test = (to_float(x).reshape(len(x), -1) for x in (data.x_train, data.x_test))
    centres = np.stack([train[data.y_train == label].mean(0) for label in range(7)])
    nearest = np.argmin(((test[:, None] - centres) ** 2).sum(-1), axis=1)
    assert (nearest == data.y_test).mean() > 0.95


@pytest.mark.parametrize("wrong", [{"train_size": 5}, {"test_size": 0}, {"classes": 0}])
def test_synthetic_refuses_impossible_sizes(wrong: dict[str, int]) -> None:
    with pytest.raises(DataError, match="synthetic: found"):
        load("synthetic", **wrong)  # type: ignore[arg-type]


def test_bytes_become_floats_between_0_and_1() -> None:
    images = to_float(np.array([[[0, 51], [102, 255]]], np.uint8))
    assert (images.shape, images.dtype) == ((1, 2, 2, 1), np.float32)
    np.testing.assert_allclose(images.ravel(), [0, 0.2, 0.4, 1], rtol=1e-6)


def test_reading_data_imports_no_framework() -> None:
    code = (
        "import sys; from hvdsync.data import load, DistributedSampler, mnist;"
        "load('synthetic', train_size=10, test_size=1); list(DistributedSampler(5));"
        "print(sorted({'torch', 'tensorflow', 'keras', 'horovod', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
