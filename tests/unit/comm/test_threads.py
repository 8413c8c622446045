"""The ranks of one node together use its cores once, and no choice of the user's is overridden."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest

from hvdsync.comm import threads
from hvdsync.comm.threads import VARIABLES, available_cores, cap, cap_pools, share_of_cores


@pytest.mark.parametrize("node", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
def test_the_shares_of_a_node_do_not_exceed_its_cores(node: int, ranks: int) -> None:
    share = share_of_cores(node, node, ranks)
    assert share >= 1
    assert share * ranks <= max(node, ranks)
    assert (share + 1) * ranks > node


def test_a_rank_that_the_launcher_has_bound_uses_what_it_was_bound_to() -> None:
    assert share_of_cores(own=4, node=16, local_size=4) == 4
    assert share_of_cores(own=1, node=16, local_size=4) == 1
    assert share_of_cores(own=8, node=16, local_size=1) == 8


def test_what_the_user_has_set_stays() -> None:
    environ = {"OMP_NUM_THREADS": "7", "PATH": "/bin"}
    cap(environ, 2)
    assert environ.pop("OMP_NUM_THREADS") == "7"
    assert environ.pop("PATH") == "/bin"
    assert environ == {name: "2" for name in VARIABLES if name != "OMP_NUM_THREADS"}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores cannot be bound here")
def test_binding_of_one_process_is_told_from_that_of_its_launcher() -> None:
    mine = os.sched_getaffinity(0)
    program = (
        f"import os; os.sched_setaffinity(0, {{{min(mine)}}})\n"
        "from hvdsync.comm.threads import available_cores; print(*available_cores())"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.split() == ["1", str(len(mine))]
    assert available_cores()[0] == len(mine)


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may use all eight cores of its node, for which nothing is chosen."""
    monkeypatch.setattr(threads, "available_cores", lambda: (8, 8))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def pretend_torch(count: int) -> types.SimpleNamespace:
    torch = types.SimpleNamespace(count=count)
    torch.get_num_threads = lambda: torch.count
    torch.set_num_threads = lambda number: setattr(torch, "count", number)
    return torch


@pytest.mark.usefixtures("cores")
def test_a_pool_of_all_cores_is_cut_to_the_share() -> None:
    torch = pretend_torch(8)
    cap_pools(torch, "torch", local_size=4)
    assert torch.count == 2
    alone = pretend_torch(8)
    cap_pools(alone, "torch", local_size=1)
    assert alone.count == 8


@pytest.mark.usefixtures("cores")
def test_a_pool_whose_size_the_user_has_chosen_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    by_function = pretend_torch(5)
    cap_pools(by_function, "torch", local_size=4)
    assert by_function.count == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    by_variable = pretend_torch(8)
    cap_pools(by_variable, "torch", local_size=4)
    assert by_variable.count == 8
