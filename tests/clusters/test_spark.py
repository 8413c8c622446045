"""Ranks as tasks of a Spark job: results, the failing rank's own traceback, an elastic job."""

from __future__ import annotations

import os
import shutil
import signal
import sys

import functions
import pytest

import hvdsync
from hvdsync.errors import LaunchError, RunFailed

pytest.importorskip("pyspark")
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not os.environ.get("JAVA_HOME") and shutil.which("java") is None,
        reason="Spark needs Java 17 or newer, and there is none here",
    ),
]


@pytest.fixture(scope="module")
def session():
    from pyspark.sql import SparkSession

    before = os.environ.get("PYSPARK_PYTHON")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    # Four tries for a task, as on a cluster: an elastic job needs more than one.
    builder = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false")
    started = builder.getOrCreate()
    started.sparkContext.setLogLevel("OFF")
    yield started
    started.stop()
    os.environ.pop("PYSPARK_PYTHON")
    if before is not None:
        os.environ["PYSPARK_PYTHON"] = before


def test_results_come_back_in_order_of_ranks(session):
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    came = hvdsync.run(functions.add, (10,), on="spark", env={"HVDSYNC_TEST_WORD": "two words"})
    assert came == [(0, 2, 21.0, "two words"), (1, 2, 21.0, "two words")]
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_the_error_is_the_failing_ranks_own_traceback_and_the_session_goes_on(session):
    with pytest.raises(RunFailed, match="rank 1 of 2 raised ValueError: .*7\nTraceback") as info:
        hvdsync.run(functions.fail, (7,), on="spark")
    assert info.value.rank == 1
    assert isinstance(info.value.__cause__, ValueError)
    assert session.range(10).count() == 10


def test_an_elastic_job_goes_on_without_the_rank_that_died(session, tmp_path):
    came = hvdsync.run(functions.shrink, (str(tmp_path),), on="spark", min_np=1, max_np=2)
    assert (tmp_path / "died").exists()
    assert (0, 1, 6) in came


def test_a_python_of_tasks_that_lacks_a_package_is_named(session, monkeypatch):
    monkeypatch.setattr(session.sparkContext, "range", bare_executor)
    with pytest.raises(LaunchError, match="Python of Spark's tasks, /bin/bare, has no hvdsync, py"):
        hvdsync.run(functions.add, (10,), on="spark")


def bare_executor(*_, **__):
    class Rows:
        def map(self, function):
            return self

        def collect(self):
            return [("/bin/bare", ["hvdsync", "pyarrow"])]

    return Rows()


def test_the_example_learns_from_parquet_and_scores_a_data_frame(accuracy, monkeypatch):
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    assert accuracy("spark_mnist.py") > 85
