"""Starting Horovod: what is set for it while it starts, and worlds that do not fit the launcher."""

import os
import types

import pytest

from hvdsync.comm import horovod, world
from hvdsync.errors import LaunchError


def fake_horovod(size, seen):
    """A module that notes the environment that it was started in, and sees ``size`` ranks."""
    hvd = types.SimpleNamespace(Sum=1, Min=2, Max=3, rank=lambda: 0, size=lambda: size)
    hvd.local_size = lambda: 1
    hvd.init = lambda *args, **kwargs: seen.append(dict(os.environ))
    hvd.shutdown = lambda: seen.append("shutdown")
    return hvd


@pytest.fixture
def start(monkeypatch):
    """Starts with a Horovod that sees ``size`` ranks."""

    def start_with(size, seen, framework="torch"):
        monkeypatch.setattr(horovod, "load", lambda framework: fake_horovod(size, seen))
        monkeypatch.setattr(horovod.threads, "cap_pools", lambda *args: None)
        horovod.start(framework)

    yield start_with
    if world.is_active():
        horovod.stop("torch")


def mpirun(monkeypatch, size):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(size))


def test_without_a_launcher_gloo_starts_alone_and_leaves_no_trace(start):
    before, seen = dict(os.environ), []
    start(1, seen)
    assert seen[0]["HOROVOD_CONTROLLER"] == seen[0]["HOROVOD_CPU_OPERATIONS"] == "gloo"
    assert dict(os.environ) == before
    assert world.is_active()


def test_what_the_user_has_set_stays(start, monkeypatch):
    mpirun(monkeypatch, 1)
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "0")
    seen = []
    start(1, seen)
    assert seen[0]["OMPI_MCA_mpi_yield_when_idle"] == "0"
    assert dict(os.environ)["OMPI_MCA_mpi_yield_when_idle"] == "0"


def test_waiting_ranks_of_mpirun_yield_their_core(start, monkeypatch):
    mpirun(monkeypatch, 1)
    seen = []
    start(1, seen)
    assert seen[0]["OMPI_MCA_mpi_yield_when_idle"] == "1"


def test_windows_within_a_host_do_without_ucx(start, monkeypatch):
    mpirun(monkeypatch, 1)
    seen = []
    start(1, seen)
    assert seen[0]["OMPI_MCA_osc"] == "^ucx"
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    start(2, seen)
    assert "OMPI_MCA_osc" not in seen[-1]


def test_ranks_that_would_each_train_alone_are_refused(start, monkeypatch):
    mpirun(monkeypatch, 2)
    seen = []
    with pytest.raises(LaunchError, match=r"mpirun started 2 ranks .*Horovod sees 1"):
        start(1, seen)
    assert seen[-1] == "shutdown"
    assert not world.is_active()


def test_an_elastic_world_may_differ_from_the_start(start, monkeypatch):
    for name, value in {"RANK": 0, "SIZE": 4, "ELASTIC": 1}.items():
        monkeypatch.setenv(f"HOROVOD_{name}", str(value))
    start(2, [])
    assert world.current().size == 2


def test_variables_of_a_job_that_no_launcher_here_has_set_are_believed(start, monkeypatch):
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name, value in zip(names, ("1", "2", "localhost", "1234"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"RANK, WORLD_SIZE.* started 2 ranks .*sees 1"):
        start(1, [])
    monkeypatch.delenv("MASTER_PORT")
    start(1, [])
    assert world.is_active()


def test_one_process_belongs_to_one_world(start):
    start(1, [])
    with pytest.raises(LaunchError, match=r"hvdsync.torch is initialised.*hvdsync.tensorflow"):
        start(1, [], "tensorflow")
    start(1, [])  # the same again is nothing new
    horovod.stop("torch")
    start(1, [], "tensorflow")
    assert world.is_active()
