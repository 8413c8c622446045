"""One Slurm for all tests of this folder, and the helpers of the integration tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "integration"))

import one_node


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """The variables of Slurm's commands."""
    if why := one_node.absent():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("slurm")
    # munged is particular about who may write above its socket.
    for above in (folder, *folder.parents):
        if above == Path(above.anchor) or above == Path("/tmp"):
            break
        above.chmod(0o755)
    with one_node.running(folder) as variables:
        yield variables
