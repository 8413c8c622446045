"""Which network interface a rank takes where the launcher named one of another host."""

from __future__ import annotations

import psutil
import pytest

from hvdsync.comm import interfaces

LOOPBACK = next(
    name
    for name, entries in psutil.net_if_addrs().items()
    if any(entry.address == "127.0.0.1" for entry in entries)
)


def variables(**changes):
    given = {
        "HOROVOD_GLOO_IFACE": "of-another",
        "NCCL_SOCKET_IFNAME": "of-another",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "1234",
        **changes,
    }
    return {name: value for name, value in given.items() if value is not None}


def test_the_interface_that_reaches_the_launcher_stands_in_for_one_that_is_not_here():
    environ = variables()
    interfaces.settle(environ)
    assert environ["HOROVOD_GLOO_IFACE"] == LOOPBACK
    assert environ["NCCL_SOCKET_IFNAME"] == LOOPBACK


def test_what_was_chosen_for_nccl_alone_stays():
    environ = variables(NCCL_SOCKET_IFNAME="ib0")
    interfaces.settle(environ)
    assert environ["HOROVOD_GLOO_IFACE"] == LOOPBACK
    assert environ["NCCL_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize(
    "changes",
    [
        {"HOROVOD_GLOO_IFACE": LOOPBACK},
        {"HOROVOD_GLOO_IFACE": None},
        {"HOROVOD_GLOO_RENDEZVOUS_ADDR": None},
        # Nothing on this host has an address from which a wrong one is reached.
        {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "255.255.255.255"},
    ],
)
def test_nothing_else_changes(changes):
    environ = variables(**changes)
    before = dict(environ)
    interfaces.settle(environ)
    assert environ == before
