"""What Horovod, as it is built here, no longer waits for: ends of cycles, and shut doors."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from train_runs import SECONDS, launcher, started

RANK = Path(__file__).with_name("cycles_rank.py")
CYCLE_SECONDS = 4
TURNS = 20


@pytest.mark.parametrize(
    ("framework", "ranks"),
    [
        ("torch", 2),
        pytest.param("torch", 4, marks=pytest.mark.slow),
        pytest.param("tensorflow", 2, marks=pytest.mark.slow),
    ],
)
def test_reductions_begin_when_the_last_rank_has_submitted_them(framework, ranks, tmp_path):
    pytest.importorskip(framework)
    command = [*launcher(ranks), sys.executable, RANK, framework, str(TURNS)]
    cycle = str(1000 * CYCLE_SECONDS)
    with started(command, tmp_path, HOROVOD_CYCLE_TIME=cycle, OMP_NUM_THREADS="1") as process:
        assert process.wait(SECONDS) == 0
    output = (tmp_path / "output").read_text()
    (took,) = (line.split()[-1] for line in output.splitlines() if "took " in line)
    # A cycle for each would be 80 seconds; what they take themselves is less than one.
    assert float(took) < TURNS * CYCLE_SECONDS / 4


def test_a_hundred_ranks_may_come_to_the_launchers_store_at_once():
    http_server = pytest.importorskip("horovod.runner.http.http_server")
    network = pytest.importorskip("horovod.runner.common.util.network")
    secret = pytest.importorskip("horovod.runner.common.util.secret")
    home = ("127.0.0.1", 0)
    store = http_server.RendezvousHTTPServer(home, http_server.RendezvousHandler, False)
    service = network.BasicService("a service", secret.make_secret_key(), None)
    with ExitStack() as stack:
        stack.callback(service.shutdown)
        stack.enter_context(store)
        # Nobody has been let in yet: who is turned away now tries again after one, three, seven s.
        for _ in range(100):
            stack.enter_context(socket.create_connection(store.server_address, timeout=SECONDS))
        assert service._server.request_queue_size >= 100
