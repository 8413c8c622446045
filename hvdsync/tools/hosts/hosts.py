"""Makes the two hosts, and takes them away: a folder and a rate in, running hosts out.

Nothing of them is left when their maker ends, however it ends: each is held by one process that
ends with its standard input, and the kernel removes what that process was the first of.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from hvdsync.errors import HvdsyncError
from hvdsync.tools.hosts import link

NAMES = ("hostA", "hostB")
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PROGRAMS = ("ip", "tc", "unshare", "nsenter", "mount", "ssh")
_SECONDS = 30


@dataclass
class Host:
    """One of the hosts, while it runs.

    Each has a ``disk`` of its own, which its processes find at ``seen``: the same path on both
    hosts, with other files. The home of its user is there, in ``home``, and ``tmp`` for what is
    temporary: processes of two hosts may have the same number, by which MPI tells its files apart.
    """

    name: str
    address: str
    interface: str
    disk: Path
    seen: Path
    pid: int = field(default=0, repr=False)

    def command(self, argv: Sequence[str | Path]) -> list[str]:
        """The command line that runs ``argv`` on this host, in the folder ``seen``."""
        return [
            *("nsenter", f"--target={self.pid}", "--mount", "--uts", "--net", "--pid", "--"),
            *("env", f"--chdir={self.seen}", f"HOME={self.seen / 'home'}"),
            f"TMPDIR={self.seen / 'tmp'}",
            *map(str, argv),
        ]

    def unplug(self) -> None:
        """Take its network away: from now on neither host hears of the other."""
        link.set_down(self.pid, self.interface)

    def die(self) -> None:
        """End all its processes at once; whoever waits for them hears nothing."""
        self.unplug()
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.pid)
            first.kill()
            first.wait(_SECONDS)


def missing() -> str | None:
    """Why this process cannot make hosts, in a few words; None when it can."""
    if not sys.platform.startswith("linux"):
        return "it needs the namespaces of Linux"
    if os.geteuid() != 0:
        return "only root may make network namespaces; run it as root"
    absent = [program for program in _PROGRAMS if shutil.which(program, path=_path()) is None]
    if absent:
        return (
            f"there is no {', '.join(absent)}; install iproute2, util-linux and openssh-client "
            "(the names of Debian's packages)"
        )
    try:
        import asyncssh  # noqa: F401
    except ImportError:
        return "the package asyncssh is not installed; `pip install 'hvdsync[bench]'` brings it"
    allowed = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"],
        capture_output=True,
        text=True,
        check=False,
    )
    if allowed.returncode:
        return f"namespaces are refused here ({allowed.stderr.strip()})"
    return None


@contextmanager
def two_hosts(
    folder: Path,
    *,
    megabits: float | None = None,
    interfaces: tuple[str, str] = ("eth0", "eth0"),
) -> Iterator[tuple[Host, Host]]:
    """Two hosts, joined by one cable, that reach one another by name with ``ssh``.

    ``folder``, which is made, gets their disks, and keys that are removed at the end. ``megabits``
    per second are what each of them sends at most; None is as fast as memory. ``interfaces`` are
    the names of the two ends of the cable.

    Raises :class:`HvdsyncError` with the reason where :func:`missing` has one, and when a host does
    not start.
    """
    reason = missing()
    if reason:
        raise HvdsyncError(f"two hosts cannot be made on this machine: {reason}")
    import asyncssh

    folder = folder.resolve()
    seen = folder / "disk"
    seen.mkdir(parents=True)
    hosts = tuple(
        Host(name, address, interface, folder / name, seen)
        for name, address, interface in zip(NAMES, _ADDRESSES, interfaces, strict=True)
    )
    key = asyncssh.generate_private_key("ssh-ed25519")
    with ExitStack() as stack:
        for host in hosts:
            stack.callback(shutil.rmtree, host.disk / "home" / ".ssh", ignore_errors=True)
            _furnish(host, key.export_private_key(), key.export_public_key())
        for host in hosts:
            stack.enter_context(_running(host))
        link.join(*((host.pid, host.interface, host.address) for host in hosts))
        if megabits is not None:
            for host in hosts:
                link.limit(host.pid, host.interface, megabits)
        yield hosts[0], hosts[1]


def _furnish(host: Host, private: bytes, public: bytes) -> None:
    """Disk, home and keys. One key is that of both hosts and of their user."""
    ssh = host.disk / "home" / ".ssh"
    ssh.mkdir(mode=0o700, parents=True)
    (host.disk / "tmp").mkdir()
    (ssh / "id_ed25519").touch(mode=0o600)
    (ssh / "id_ed25519").write_bytes(private)
    (ssh / "authorized_keys").write_bytes(public)
    known = "".join(f"{name} {public.decode()}" for name in (*NAMES, *_ADDRESSES))
    (ssh / "known_hosts").write_text(known)
    names = "".join(f"{a} {n}\n" for n, a in zip(NAMES, _ADDRESSES, strict=True))
    _file_of(host, "hosts").write_text(f"127.0.0.1 localhost\n{names}")
    _file_of(host, "passwd").write_text(_users(host.seen / "home"))


def _file_of(host: Host, name: str) -> Path:
    return host.disk.with_name(f"{host.name}.{name}")


def _users(home: Path) -> str:
    """The users of this machine, this one with another home: ssh does not ask HOME for it."""
    lines = []
    for line in Path("/etc/passwd").read_text().splitlines():
        entries = line.split(":")
        if entries[2] == str(os.geteuid()):
            entries[5] = str(home)
        lines.append(":".join(entries) + "\n")
    return "".join(lines)


@contextmanager
def _running(host: Host) -> Iterator[None]:
    settings = {
        "name": host.name,
        "tmp": str(host.seen / "tmp"),
        "mounts": [
            [str(_file_of(host, "hosts")), "/etc/hosts"],
            [str(_file_of(host, "passwd")), "/etc/passwd"],
            [str(host.disk), str(host.seen)],
        ],
    }
    with _file_of(host, "log").open("w") as log:
        process = subprocess.Popen(
            [
                *("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc"),
                *(sys.executable, "-m", "hvdsync.tools.hosts.machine", json.dumps(settings)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert process.stdin is not None and process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise HvdsyncError(
                f"host {host.name} did not start: {_file_of(host, 'log').read_text().strip()}"
            )
        host.pid = psutil.Process(process.pid).children()[0].pid
        yield
    finally:
        process.stdin.close()  # which ends the host's first process, and that all others
        try:
            process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.wait()
        process.stdout.close()


def _path() -> str:
    """Where programs are; those for root are not on the PATH of everyone."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
