"""Ranks as actors of a Ray cluster: results, the failing rank's own traceback, elastic jobs."""

from __future__ import annotations

import functions
import pytest

import hvdsync
from hvdsync.errors import LaunchError, RunFailed

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


def test_results_come_back_in_order_of_ranks(cluster):
    came = hvdsync.run(functions.add, (10,), on="ray", env={"HVDSYNC_TEST_WORD": "two words"})
    assert came == [(0, 2, 21.0, "two words"), (1, 2, 21.0, "two words")]
    assert ray.is_initialized()


def test_the_error_is_the_failing_ranks_own_traceback(cluster):
    with pytest.raises(RunFailed, match="rank 1 of 2 raised ValueError: .*7\nTraceback") as info:
        hvdsync.run(functions.fail, (7,), on="ray")
    assert info.value.rank == 1
    assert isinstance(info.value.__cause__, ValueError)


def test_ranks_that_find_no_place_are_told_what_there_is(cluster):
    with pytest.raises(LaunchError, match="Ray did not place the ranks"):
        hvdsync.run(functions.add, (10,), on="ray", cpus_per_rank=2, start_timeout_seconds=5)


def test_ranks_are_placed_in_the_group_that_runs_them(cluster):
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}])
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    path = functions.__file__

    @ray.remote(num_cpus=0, scheduling_strategy=strategy)
    def driver():
        import sys
        from pathlib import Path

        sys.path.append(str(Path(path).parent))
        import functions

        return hvdsync.run(functions.add, (10,), on="ray", start_timeout_seconds=120)

    # Both cores are the group's: ranks outside of it would never start.
    assert [rank[:3] for rank in ray.get(driver.remote())] == [(0, 2, 21.0), (1, 2, 21.0)]
    ray.util.remove_placement_group(group)


def test_an_elastic_job_on_one_host_does_not_wait_for_a_second(cluster, tmp_path):
    (tmp_path / "died").touch()  # nobody is to die: that would end a job of one host
    came = hvdsync.run(functions.shrink, (str(tmp_path),), on="ray", min_np=1, max_np=2)
    assert came == [(0, 2, 6), (1, 2, 6)]


def test_the_example_learns(accuracy):
    assert accuracy("ray_mnist.py") > 85
