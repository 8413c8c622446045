"""What ``hvdsync.run`` says where something is absent: one sentence, with what to do."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types

import pytest

import hvdsync
from hvdsync.errors import HorovodMissing, LaunchError
from hvdsync.launch import on_spark

ABSENT = [("spark", "pyspark"), ("spark", "pyarrow"), ("ray", "ray")]


def answer():
    return 42


@pytest.mark.parametrize(("on", "package"), ABSENT)
def test_an_absent_package_is_named_with_the_command_that_installs_it(monkeypatch, on, package):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else object()
    )
    with pytest.raises(LaunchError, match=rf"needs {package}, .*pip install \"hvdsync\[{on}\]\""):
        hvdsync.run(answer, on=on)
    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_absent_horovod_is_named_with_the_command_that_builds_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HorovodMissing, match="run `python -m hvdsync build-horovod`"):
        hvdsync.run(answer)


@pytest.fixture
def no_session(monkeypatch):
    """PySpark as it is in a process without a session."""
    session = types.SimpleNamespace(getActiveSession=lambda: None)
    monkeypatch.setitem(sys.modules, "pyspark", types.ModuleType("pyspark"))
    sql = types.ModuleType("pyspark.sql")
    sql.SparkSession = session
    monkeypatch.setitem(sys.modules, "pyspark.sql", sql)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("JAVA_HOME", raising=False)


def test_without_a_session_spark_is_asked_for_one(no_session, monkeypatch):
    monkeypatch.setattr(on_spark.shutil, "which", lambda name: "/usr/bin/java")
    with pytest.raises(LaunchError, match=r"inside a SparkSession.*none\. Make one first"):
        hvdsync.run(answer, on="spark")


def test_without_java_spark_is_told_so(no_session, monkeypatch):
    monkeypatch.setattr(on_spark.shutil, "which", lambda name: None)
    with pytest.raises(LaunchError, match="Spark needs Java 17 or newer, and there is none here"):
        hvdsync.run(answer, on="spark")


def test_importing_hvdsync_imports_nothing_heavy_and_still_has_run():
    script = (
        "import sys, hvdsync\n"
        "heavy = {'numpy', 'cloudpickle', 'horovod', 'torch', 'tensorflow', 'pyspark', 'ray'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert callable(hvdsync.run)\n"
        "assert not {'horovod', 'torch', 'tensorflow', 'pyspark', 'ray'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_other_names_are_absent():
    with pytest.raises(AttributeError, match="no attribute 'walk'"):
        hvdsync.walk
