"""What a terminal would give to the commands that these tests start."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _commands_can_be_interrupted() -> Iterator[None]:
    # A shell that runs the tests in the background lets them ignore SIGINT, and they would hand
    # that on to all they start. A handler, as this one, is not handed on.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
