"""The network interface of this host for what a launcher named on another: variables in and out.

``horovodrun`` gives all ranks one name, which is that of an interface of its own host.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping

import psutil

logger = logging.getLogger(__name__)

_GLOO = "HOROVOD_GLOO_IFACE"
_NCCL = "NCCL_SOCKET_IFNAME"
_LAUNCHER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def settle(environ: MutableMapping[str, str] | None = None) -> None:
    """Name an interface of this host where that of the launcher is none: what reaches the launcher.

    Changes ``HOROVOD_GLOO_IFACE`` in ``environ`` (by default the process's own), and
    ``NCCL_SOCKET_IFNAME`` if it is the same name. Nothing changes where the interface exists, nor
    where no interface of this host reaches the launcher.
    """
    variables = os.environ if environ is None else environ
    named = variables.get(_GLOO)
    address = variables.get(_LAUNCHER[0])
    addresses = psutil.net_if_addrs()
    if not named or not address or named in addresses:
        return
    own = _source(address, int(variables.get(_LAUNCHER[1], 1)))
    found = next(
        (name for name, entries in addresses.items() if any(e.address == own for e in entries)),
        None,
    )
    if found is None:
        return
    logger.info(
        "this host has no network interface %s; %s is taken, which reaches %s",
        *(named, found, address),
    )
    variables[_GLOO] = found
    if variables.get(_NCCL) == named:
        variables[_NCCL] = found


def _source(address: str, port: int) -> str | None:
    """The address of this host from which ``address`` is reached; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError:
            return None
        return str(probe.getsockname()[0])
