"""Where rank 0 listens reaches all ranks through the launcher's store, or over MPI."""

import ctypes
import http.server
import threading
import time

import pytest

from hvdsync.guard.watch import rendezvous


class Store(http.server.BaseHTTPRequestHandler):
    """As the launcher's: values under paths, 404 for what is not there yet."""

    def do_PUT(self):
        self.server.values[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.reply(200)

    def do_GET(self):
        value = self.server.values.get(self.path)
        self.reply(404 if value is None else 200, value or b"")

    def reply(self, status, body=b""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def store(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Store)
    server.values = {}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(server.server_address[1]))
    # A proxy is not asked for the launcher's store.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


class Gloo:
    def mpi_enabled(self):
        return False


class Mpi:
    """Ranks of MPI whose broadcast passes through a variable."""

    def __init__(self, processes=2):
        self.MPI_LIB_CTYPES = self
        self.processes = processes
        self.sent = None

    def mpi_enabled(self):
        return True

    def mpi_threads_supported(self):
        return True

    def MPI_Comm_size(self, world, size):
        size._obj.value = self.processes
        return 0

    def MPI_Bcast(self, buffer, count, kind, root, world):
        if self.sent is None:
            self.sent = ctypes.string_at(buffer, count)
        ctypes.memmove(buffer, self.sent, count)
        return 0


@pytest.fixture(autouse=True)
def numbers_as_in_a_process_per_rank(monkeypatch):
    class Same:
        def __next__(self):
            return 0

    monkeypatch.setattr(rendezvous, "_worlds", Same())


def test_ranks_that_ask_before_rank_0_has_said_wait_for_it(store):
    heard = {}

    def ask(rank):
        heard[rank] = rendezvous.tell_all(Gloo(), rank, 3, None)

    threads = [threading.Thread(target=ask, args=(rank,)) for rank in (1, 2)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert heard == {}
    said = {"port": 7, "addresses": ["ä"]}
    assert rendezvous.tell_all(Gloo(), 0, 3, said) == said
    for thread in threads:
        thread.join()
    assert heard == {1: said, 2: said}


def test_each_world_of_a_process_has_a_value_of_its_own(store, monkeypatch):
    numbers = iter(range(2))
    monkeypatch.setattr(rendezvous, "_worlds", numbers)
    rendezvous.tell_all(Gloo(), 0, 2, {"port": 1})
    rendezvous.tell_all(Gloo(), 0, 2, {"port": 2})
    assert sorted(store.values) == ["/hvdsync.watch/world-0", "/hvdsync.watch/world-1"]


def test_without_a_store_nobody_learns_it(monkeypatch):
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", raising=False)
    assert rendezvous.tell_all(Gloo(), 0, 2, {"port": 7}) is None
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", "9")
    assert rendezvous.tell_all(Gloo(), 1, 2, None) is None


def test_over_mpi_it_is_broadcast(monkeypatch):
    monkeypatch.setattr(rendezvous, "_handles", lambda library: (None, None))
    mpi = Mpi()
    assert rendezvous.tell_all(mpi, 0, 2, {"port": 7}) == {"port": 7}
    assert rendezvous.tell_all(mpi, 1, 2, None) == {"port": 7}


def test_a_world_that_is_a_part_of_mpis_is_left_alone(monkeypatch):
    monkeypatch.setattr(rendezvous, "_handles", lambda library: (None, None))
    mpi = Mpi(processes=4)
    assert rendezvous.tell_all(mpi, 0, 2, {"port": 7}) is None
    assert mpi.sent is None
