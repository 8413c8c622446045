"""Fixtures of all frameworks' suites; each suite's own ``conftest.py`` starts its world."""

import pytest

from hvdsync.comm import verbs
from tests.parallel.ranks import over_mpi


@pytest.fixture
def shared_path(tmp_path_factory):
    """A folder of rank 0 that all ranks know."""
    return verbs.broadcast_object(tmp_path_factory.mktemp("shared") if verbs.rank() == 0 else None)


@pytest.fixture
def several_ranks():
    if verbs.size() == 1:
        pytest.skip("one rank has nobody to differ from")


@pytest.fixture
def mpi(several_ranks):
    if not over_mpi():
        pytest.skip("needs a launch over MPI")


@pytest.fixture
def gloo(several_ranks):
    if over_mpi():
        pytest.skip("needs a launch over Gloo")
