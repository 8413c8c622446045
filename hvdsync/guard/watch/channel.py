"""One connection between a rank and rank 0: dictionaries go in on one side, out on the other.

Each travels as JSON behind its length; nothing that is received can run code.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import weakref
from contextlib import suppress
from typing import Any

_LENGTH = struct.Struct("!I")
_MOST_BYTES = 2**24
_SEND_SECONDS = 5

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_registered = False


class Channel:
    """Messages over a connected socket; any thread may send, one receives."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = own(connected)
        # A rank that was stopped reads nothing: whoever writes to it must not stop too.
        timeout = struct.pack("ll", _SEND_SECONDS, 0)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message; False when the other side is gone or takes nothing."""
        payload = json.dumps(message).encode()
        try:
            with self._sending:
                self._socket.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError:
            return False
        return True

    def receive(self) -> dict[str, Any] | None:
        """The next message; None when the other side has closed, or sends what is none."""
        try:
            (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
            if length > _MOST_BYTES:
                return None
            message = json.loads(self._read(length))
        except (OSError, EOFError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """Close both directions; the other side's ``receive`` gives None."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            part = self._socket.recv(min(count, 2**16))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def own(opened: socket.socket) -> socket.socket:
    """The socket, which no child of this process keeps open.

    A loader's worker that lives on after its rank was killed would make the rank look alive.
    """
    global _registered
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_close_all)
    _open.add(opened)
    return opened


def _close_all() -> None:
    for opened in list(_open):
        with suppress(OSError):
            os.close(opened.detach())
    _open.clear()
