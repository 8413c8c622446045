"""A world of any rank and size in one process, for code that only asks who and how many it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hvdsync.comm import world
from hvdsync.comm.communicator import SingleProcess


class PretendedWorld(SingleProcess):
    """Knows rank and size; its collectives are those of one process."""

    def __init__(self, rank: int, size: int, local_size: int) -> None:
        self.rank, self.size = rank, size
        self.local_rank, self.local_size = rank % local_size, local_size


@pytest.fixture
def pretend() -> Iterator[Callable[..., None]]:
    """``pretend(rank, size)`` makes this process that rank, until the test is over."""

    def be(rank: int, size: int, local_size: int | None = None) -> None:
        world.activate(PretendedWorld(rank, size, local_size or size))

    yield be
    world.deactivate()
