"""Where this host can be reached: its network interfaces in, their addresses out."""

from __future__ import annotations

import socket

import psutil

LOOPBACK = "127.0.0.1"


def own_addresses(*, one_host: bool) -> list[str]:
    """The IPv4 addresses under which other ranks may reach this host.

    ``one_host``: all ranks are on this host, so that the loopback is enough.
    """
    if one_host:
        return [LOOPBACK]
    return [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ] or [LOOPBACK]
