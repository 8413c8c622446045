"""Two hosts on one machine: they are apart from one another, and nothing of them is left."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from hvdsync.errors import HvdsyncError
from hvdsync.tools.hosts import hosts as hosts_module
from hvdsync.tools.hosts import missing, two_hosts

REASON = missing()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=f"two hosts cannot be made: {REASON}")
SECONDS = 60


def run(command, code=0):
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout


@needs_hosts
def test_hosts_have_names_addresses_and_disks_of_their_own_and_reach_one_another(tmp_path):
    with two_hosts(tmp_path / "hosts", megabits=200, interfaces=("eth0", "ens1")) as (a, b):
        whoami = "hostname; pwd; echo $HOME; cat mine"
        for host in (a, b):
            (host.disk / "mine").write_text(f"the disk of {host.name}\n")
        here = f"{a.seen}\n{a.seen / 'home'}\n"
        assert run(a.command(["sh", "-c", whoami])) == f"hostA\n{here}the disk of hostA\n"
        there = run(a.command(["ssh", "hostB", f"cd {b.seen}; {whoami}"]))
        assert there == f"hostB\n{here}the disk of hostB\n"
        assert run(b.command(["ssh", a.address, "hostname"])) == "hostA\n"
        assert "10.77.0.2/24" in run(b.command(["ip", "-brief", "address", "show", "ens1"]))
        for host in (a, b):
            shown = run(host.command(["tc", "qdisc", "show", "dev", host.interface]))
            assert "tbf" in shown and "rate 200Mbit" in shown
    assert not list(tmp_path.rglob("id_ed25519"))


@needs_hosts
def test_commands_over_ssh_get_no_environment_and_give_output_and_exit_code_back(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("OF_THE_USER", "here")
    with two_hosts(tmp_path / "hosts") as (a, _):
        assert run(a.command(["sh", "-c", "echo $OF_THE_USER"])) == "here\n"
        assert run(a.command(["ssh", "hostB", "echo $OF_THE_USER"])) == "\n"
        assert run(a.command(["ssh", "hostB", "exit 7"]), code=7) == ""
        long = run(a.command(["ssh", "hostB", "yes | head -c 1000000; echo done >&2"]))
        assert len(long) == 1_000_000


@needs_hosts
def test_a_host_that_dies_takes_its_processes_with_it(tmp_path):
    with two_hosts(tmp_path / "hosts") as (a, b):
        sleeping = subprocess.Popen(b.command(["sleep", str(SECONDS)]))
        b.die()
        assert sleeping.wait(SECONDS) != 0
        run(a.command(["ssh", "-o", "ConnectTimeout=1", "hostB", "true"]), code=255)


@needs_hosts
def test_nothing_is_left_when_their_maker_is_killed(tmp_path):
    maker = textwrap.dedent(
        f"""
        from pathlib import Path
        from hvdsync.tools.hosts import two_hosts
        with two_hosts(Path({str(tmp_path / "hosts")!r})) as hosts:
            print(*(host.pid for host in hosts), flush=True)
            input()
        """
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(
        [sys.executable, "-c", maker],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    with process:
        first = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        others = [child for host in first for child in host.children(recursive=True)]
        assert len(first) == 2 and len(others) >= 2
        process.kill()
    _, alive = psutil.wait_procs([*first, *others], timeout=SECONDS)
    assert not alive


def test_who_is_not_root_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = "only root may make network namespaces"
    with pytest.raises(HvdsyncError, match=reason), two_hosts(tmp_path / "hosts"):
        pass
    assert not (tmp_path / "hosts").exists()


def test_programs_that_are_not_there_are_named(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts_module, "_PROGRAMS", ("sh", "no-such-tc", "no-such-ip"))
    assert (missing() or "").startswith("there is no no-such-tc, no-such-ip; install iproute2")
