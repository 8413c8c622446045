"""``python -m hvdsync.train --elastic``: workers are killed and join, each sample counts once."""

from __future__ import annotations

import json
import socket
from collections import Counter
from pathlib import Path

import pytest
from killed_runs import make_data
from train_runs import SECONDS, events, newest, started, wait_for, weights

FRAMEWORKS = ["torch", "tensorflow", "keras"]
RANK = Path(__file__).with_name("elastic_rank.py")
EPOCHS, SAMPLES = 3, 203  # of which two ranks make 13 steps an epoch
# What is a host of its own for the launcher, and this machine all the same.
HOSTS = ["localhost", "127.0.0.1", socket.gethostname()]


def start(folder, framework, hosts, **variables):
    make_data(folder / "data")
    (folder / "notes").mkdir()
    write_hosts(folder, hosts)
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {folder / 'hosts'}\n")
    script.chmod(0o755)
    command = [
        *("horovodrun", "-np", str(len(hosts)), "--min-np", "1", "--max-np", "4"),
        # Named, because Horovod would wait for a second host to find a common one.
        *("--network-interface", "lo"),
        *("--host-discovery-script", script, "python", RANK, "--elastic", "--commit-every", "4"),
        *("--framework", framework, "--model", "mlp", "--dataset", "data", "--device", "cpu"),
        *("--epochs", str(EPOCHS), "--batch-size", "8", "--optimizer", "momentum", "--lr", "0.01"),
        *("--scale-lr", "linear", "--warmup-epochs", "0"),
        *("--checkpoint-dir", "run", "--log-dir", "log"),
    ]
    return started(command, folder, NOTES=str(folder / "notes"), **variables)


def write_hosts(folder, hosts):
    written = folder / "hosts.new"
    written.write_text("".join(f"{host}:1\n" for host in hosts))
    written.rename(folder / "hosts")


def finish(process, folder):
    """Waits for the end of a run; gives the sizes of its worlds and where each was taken up."""
    assert process.wait(SECONDS) == 0, (folder / "output").read_text()
    told = events(folder / "log")
    assert told[-1]["event"] == "end" and told[-1]["epochs"] == EPOCHS
    return [(e["workers"], e["step"]) for e in told if e["event"] == "world"]


def assert_each_sample_was_trained_on_once(folder):
    """In the run that remains: what came after the commit that a later world went back to is not
    part of it."""
    returns = [(e["time"], e["step"]) for e in events(folder / "log") if e["event"] == "world"]
    counts = [Counter() for _ in range(EPOCHS)]
    for notes in (folder / "notes").iterdir():
        for line in notes.read_text().splitlines():
            when, _, epoch, step, samples = json.loads(line)
            if not any(when < later and step > taken_up for later, taken_up in returns):
                counts[epoch].update(samples)
    for count in counts:
        assert count == Counter(range(SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_worker_is_killed_and_another_joins(framework, tmp_path):
    with start(tmp_path, framework, HOSTS[:2], DIE="1:19", WAIT="22") as process:
        wait_for((tmp_path / "waiting").exists, process, "rank 0 waits")
        write_hosts(tmp_path, HOSTS)  # that of the dead is not used again
        worlds = finish(process, tmp_path)
    # Thirteen steps are an epoch; a commit follows it and every fourth step. The worker that is
    # lost takes steps with it; at a commit the world grows and nothing is lost.
    assert worlds == [(1, 16), (2, 24)]
    assert_each_sample_was_trained_on_once(tmp_path)
    rates = {e["learning_rate"] for e in events(tmp_path / "log") if e["event"] == "step"}
    assert rates <= {0.02, 0.01}
    assert len(weights(newest(tmp_path / "run"))) > 0


@pytest.mark.slow
def test_two_of_three_workers_are_killed_one_after_the_other(tmp_path):
    with start(tmp_path, "torch", HOSTS, DIE="2:6,1:15") as process:
        worlds = finish(process, tmp_path)
    assert [size for size, _ in worlds] == [2, 1]
    assert_each_sample_was_trained_on_once(tmp_path)


@pytest.mark.slow
def test_the_first_worker_may_die_and_another_one_speaks_for_the_run(tmp_path):
    with start(tmp_path, "torch", HOSTS[:2], DIE="0:19") as process:
        worlds = finish(process, tmp_path)
    assert worlds == [(1, 16)]
    assert_each_sample_was_trained_on_once(tmp_path)
    assert "1 worker(s) now; going on after step 16" in (tmp_path / "output").read_text()
