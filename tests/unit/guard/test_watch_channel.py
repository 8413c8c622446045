"""Messages between ranks: whole, in order, harmless, and no child keeps them alive."""

import os
import socket
import struct
import threading

import pytest

from hvdsync.guard.watch.channel import Channel


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    channels = Channel(one), Channel(other)
    yield channels
    for channel in channels:
        channel.close()


def test_messages_arrive_whole_and_in_order(pair):
    sent = [{"n": i, "text": "ä\n" * 50_000} for i in range(3)]
    thread = threading.Thread(target=lambda: [pair[0].send(message) for message in sent])
    thread.start()
    assert [pair[1].receive() for _ in sent] == sent
    thread.join()


def test_a_closed_connection_is_the_end(pair):
    pair[0].send({"last": True})
    pair[0].close()
    assert pair[1].receive() == {"last": True}
    assert pair[1].receive() is None
    assert pair[1].send({}) in (True, False)
    assert pair[1].send({"x": "y" * 10_000_000}) is False


@pytest.mark.parametrize(
    "wire", [b"\xff\xff\xff\xff", struct.pack("!I", 3) + b"{]}", struct.pack("!I", 2) + b"[]"]
)
def test_what_is_no_message_ends_the_connection_too(wire):
    one, other = socket.socketpair()
    one.sendall(wire)
    one.close()
    assert Channel(other).receive() is None


def test_a_child_by_fork_does_not_keep_a_connection_open(pair):
    held, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(held, 1)  # until the parent closes its end
        os._exit(0)
    try:
        os.close(held)
        # Not closed by shutdown, which would reach the child's copy too, but as a death would.
        os.close(pair[0]._socket.detach())
        pair[1]._socket.settimeout(10)
        assert pair[1]._socket.recv(1) == b""
    finally:
        os.close(end)
        os.waitpid(child, 0)
