"""``horovodrun`` across two hosts over ssh: slow links, own disks and interfaces, lost hosts."""

from __future__ import annotations

import gzip
import re
import shutil
from pathlib import Path

import pytest
from killed_runs import make_data
from train_runs import environment, events, newest, started, succeed, wait_for, weights

from hvdsync.data import mnist
from hvdsync.tools.hosts import missing, two_hosts

REASON = missing()
SECONDS = 600  # for one run
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * SECONDS + 60),
    pytest.mark.skipif(REASON is not None, reason=f"two hosts cannot be made: {REASON}"),
]
RANK = Path(__file__).with_name("hosts_rank.py")
FOUR = ("-np", "4", "-H", "hostA:2,hostB:2")
TRAIN = ("python", RANK, "--device", "cpu", "--model", "mlp", "--checkpoint-dir", "run")


@pytest.fixture
def hosts(tmp_path):
    with two_hosts(tmp_path / "hosts", megabits=200, interfaces=("eth0", "ens1")) as made:
        yield made


def lines(path):
    return path.read_text().splitlines() if path.exists() else []


def pack_mnist(host):
    """MNIST as it comes from afar, in the cache of the host's user."""
    folder = host.disk / "home" / ".cache" / "hvdsync" / "mnist"
    folder.mkdir(parents=True)
    for name in mnist.MD5:
        data = (mnist.default_directory() / name).read_bytes()
        (folder / f"{name}.gz").write_bytes(gzip.compress(data, 1))


def test_four_ranks_on_two_hosts_train_over_a_slow_link_and_go_on_over_mpi(hosts, tmp_path):
    first, second = hosts
    for host in hosts:
        pack_mnist(host)
    train = (*TRAIN, "--batch-size", "512", "--log-dir", "log")
    # The interface of the launcher's host; that of the other has another name.
    gloo = ("horovodrun", "--gloo", *FOUR, "--network-interface", "eth0", *train, "--epochs", "1")
    output = succeed(first.command(gloo), tmp_path, SECONDS)
    assert "4 worker(s), 512 samples each" in output
    # 60,000 samples in batches of 4 x 512.
    assert {line.split()[0] for line in lines(first.disk / "steps")} == {"0", "1"}
    assert {line.split()[0] for line in lines(second.disk / "steps")} == {"2", "3"}
    for host in hosts:
        assert len(lines(host.disk / "steps")) == 2 * 30
        # One process of each host fetched what both of its ranks read.
        assert len(lines(host.disk / "fetched")) == 1
    assert newest(first.disk / "run").name == "step-00000030"
    assert not list(second.disk.glob("run/step-*"))
    (once,) = [e for e in events(first.disk / "log") if e["event"] == "epoch"]
    assert once["test_accuracy"] > 0.6

    if shutil.which("mpirun", path=environment()["PATH"]) is None:
        return
    # MPI takes a subnet where interfaces have different names.
    mpi = ("horovodrun", "--mpi", *FOUR, "--network-interface", "10.77.0.0/24", *train)
    output = succeed(first.command((*mpi, "--epochs", "2")), tmp_path, SECONDS)
    assert newest(first.disk / "run").name == "step-00000060"
    assert len(lines(second.disk / "steps")) == 4 * 30
    twice = [e for e in events(first.disk / "log") if e["event"] == "epoch"][-1]
    assert twice["epoch"] == 2 and twice["test_accuracy"] > once["test_accuracy"]
    assert len(weights(newest(first.disk / "run"))) > 0


def test_a_host_that_does_not_answer_is_named(hosts, tmp_path):
    first, second = hosts
    second.unplug()
    command = ("horovodrun", "--gloo", *FOUR, "python", "-c", "raise SystemExit(9)")
    with started(first.command(command), tmp_path) as process:
        assert process.wait(SECONDS) not in (0, 9)
    output = (tmp_path / "output").read_text()
    assert "ssh not successful for host hostB" in output
    assert "could not connect to some hosts via ssh" in output


def start_endless(hosts, folder, *options, launch=()):
    """A run of many short steps that is under way on both hosts."""
    for host in hosts:
        make_data(host.disk / "data")
    command = ("horovodrun", *launch, *FOUR, "--network-interface", "eth0", *TRAIN)
    more = ("--dataset", "data", "--batch-size", "8", "--log-dir", "log", *options)
    return started(hosts[0].command((*command, *more)), folder)


def test_a_host_that_is_lost_in_an_epoch_ends_a_static_run_and_its_ranks_are_named(hosts, tmp_path):
    limit = ("--wait-limit", "5", "--epochs", "999")
    with start_endless(hosts, tmp_path, *limit, launch=("--gloo",)) as process:
        second = hosts[1]
        wait_for(lambda: len(lines(second.disk / "steps")) > 4, process, "both hosts train")
        second.die()
        code = process.wait(SECONDS)
    output = (tmp_path / "output").read_text()
    assert code == 1, output
    said = output[output.index("horovodrun: the last lines") :]
    for rank in (2, 3):
        assert re.search(rf"rank {rank} does not answer: process \d+ on hostB", said)
    assert "What to do: " in said


def test_an_elastic_run_goes_on_without_a_host_that_is_lost_in_an_epoch(hosts, tmp_path):
    # A connection over which nothing comes any more is no failure to ssh unless it is told to ask.
    (hosts[0].disk / "home" / ".ssh" / "config").write_text(
        "ServerAliveInterval 1\nServerAliveCountMax 3\n"
    )
    elastic = ("--elastic", "--commit-every", "2", "--epochs", "30", "--wait-limit", "5")
    launch = ("--min-np", "2", "--max-np", "4")
    with start_endless(hosts, tmp_path, *elastic, launch=launch) as process:
        second = hosts[1]
        wait_for(lambda: len(lines(second.disk / "steps")) > 4, process, "both hosts train")
        second.die()
        code = process.wait(SECONDS)
    output = (tmp_path / "output").read_text()
    assert code == 0, output
    told = events(hosts[0].disk / "log")
    assert told[-1]["event"] == "end" and told[-1]["epochs"] == 30
    assert [e["workers"] for e in told if e["event"] == "world"] == [2]
