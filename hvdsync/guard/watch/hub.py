"""Where all ranks meet: a thread of rank 0 that hears each rank and passes on what all must know.

Connections of ranks come in; endings, questions and verdicts go out to every rank that lives.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from hvdsync.comm.addresses import LOOPBACK, own_addresses
from hvdsync.guard.watch.channel import Channel, own
from hvdsync.guard.watch.endings import Ending
from hvdsync.guard.watch.inquiry import Inquiry
from hvdsync.guard.watch.record import Record
from hvdsync.guard.watch.threads import start

_HELLO_SECONDS = 10


@dataclass
class _Member:
    channel: Channel
    host: str
    pid: int
    connected: bool = True


class Hub:
    """Listens on a port of its own from the beginning until :meth:`close`.

    ``one_host``: all ranks are on this host, so that nobody else needs to reach the port.
    """

    def __init__(self, size: int, limit: float, *, one_host: bool) -> None:
        self._members: dict[int, _Member] = {}
        self._endings: dict[int, Ending] = {}
        self._lock = threading.Lock()
        self._token = secrets.token_hex(16)
        self._inquiry = Inquiry(size, limit, self)
        self._listener = own(socket.create_server((LOOPBACK if one_host else "", 0)))
        self._one_host = one_host
        start(self._accept, "hub")

    def invitation(self) -> dict[str, Any]:
        """What the other ranks need to know to come here."""
        return {
            "host": socket.gethostname(),
            "pid": psutil.Process().pid,
            "addresses": own_addresses(one_host=self._one_host),
            "port": self._listener.getsockname()[1],
            "token": self._token,
        }

    def close(self) -> None:
        """Hang up."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for member in list(self._members.values()):
            member.channel.close()

    def living(self) -> list[int]:
        """The ranks that are connected and have not ended, in order."""
        with self._lock:
            members = sorted(self._members.items(), key=lambda item: item[0])
            return [r for r, m in members if m.connected and r not in self._endings]

    def endings(self) -> list[Ending]:
        """How ranks ended, first to last."""
        with self._lock:
            return list(self._endings.values())

    def send_all(self, message: dict[str, Any]) -> None:
        """Send to every rank that is connected."""
        with self._lock:
            members = [m for m in self._members.values() if m.connected]
        for member in members:
            member.channel.send(message)

    def state_of(self, rank: int) -> str:
        """What the system says of a silent rank's process, if it is on this host."""
        member = self._members.get(rank)
        if member is None:
            return "it never came to the watch"
        return state_of(member.host, member.pid)

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return
            start(partial(self._attend, connected), "member")

    def _attend(self, connected: socket.socket) -> None:
        channel = Channel(connected)
        connected.settimeout(_HELLO_SECONDS)
        hello = channel.receive() or {}
        if not hmac.compare_digest(str(hello.get("token")), self._token):
            channel.close()
            return
        connected.settimeout(None)
        rank = int(hello["rank"])
        member = _Member(channel, hello["host"], hello["pid"])
        with self._lock:
            self._members[rank] = member
            known = list(self._endings.values())
        for ending in known:
            channel.send({"kind": "ended", **ending.as_dict()})
        while (message := channel.receive()) is not None:
            self._hear(rank, channel, message)
        with self._lock:
            member.connected = False
        self._end(Ending(rank, "died"))
        self.send_all({"kind": "gone", "rank": rank})

    def _hear(self, rank: int, channel: Channel, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        if kind == "overdue":
            channel.send({"kind": "heard"})
            self._inquiry.begin()
        elif kind == "record":
            self._inquiry.answer(message["round"], Record.from_dict(message["record"]))
        elif kind == "told":
            self._inquiry.told(rank)
        elif kind == "ended":
            self._end(Ending(**message))
            channel.send({"kind": "noted"})

    def _end(self, ending: Ending) -> None:
        with self._lock:
            if ending.rank in self._endings:
                return
            self._endings[ending.rank] = ending
        self.send_all({"kind": "ended", **ending.as_dict()})


def state_of(host: str, pid: int) -> str:
    """What the system says of a process, in words; nothing when it is on another host."""
    if host != socket.gethostname():
        return f"process {pid} on {host}"
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return f"its process {pid} is gone"
    if status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return f"its process {pid} is stopped (SIGSTOP); SIGCONT lets it go on"
    return f"its process {pid} is {status}; a call into C may keep Python's lock"
