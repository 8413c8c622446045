"""The cable between two hosts: their first processes in, addresses and a rate on their ends out."""

from __future__ import annotations

import subprocess

from hvdsync.errors import HvdsyncError

# A burst longer than this lets whole messages through at full speed; a shorter one cannot keep up.
_BURST_SECONDS = 0.001
_LEAST_BURST_BYTES = 8 * 1024
_QUEUE = "50ms"

End = tuple[int, str, str]


def join(first: End, second: End) -> None:
    """Lay a cable between two hosts; an end is (first process, interface, IPv4 address)."""
    ends = [["name", name, "netns", str(pid)] for pid, name, _ in (first, second)]
    _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    for pid, interface, address in (first, second):
        inside(pid, "ip", "link", "set", "lo", "up")
        inside(pid, "ip", "address", "add", f"{address}/24", "dev", interface)
        inside(pid, "ip", "link", "set", interface, "up")


def limit(pid: int, interface: str, megabits: float) -> None:
    """Let an interface send no more than so many megabits per second."""
    burst = max(_LEAST_BURST_BYTES, int(megabits * 1e6 / 8 * _BURST_SECONDS))
    rate = ("rate", f"{int(megabits * 1e6)}bit", "burst", str(burst), "latency", _QUEUE)
    inside(pid, "tc", "qdisc", "replace", "dev", interface, "root", "tbf", *rate)


def set_down(pid: int, interface: str) -> None:
    """Take an interface away from the network; its address stays."""
    inside(pid, "ip", "link", "set", interface, "down")


def inside(pid: int, *command: str) -> None:
    """Run a command in the network of the host that ``pid`` is a process of."""
    _run("nsenter", f"--target={pid}", "--net", "--", *command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HvdsyncError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
