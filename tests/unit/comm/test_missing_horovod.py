"""What a user reads who imports a front door before Horovod is built."""

import importlib.machinery
import importlib.util

import pytest

from hvdsync.comm import horovod
from hvdsync.errors import HorovodMissing


def test_no_horovod_says_what_to_run(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="not installed; run `python -m hvdsync build-horovod"):
        horovod.load("torch")


def test_horovod_built_for_another_framework_says_what_to_run(monkeypatch, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "mpi_lib_v2.cpython-311-x86_64-linux-gnu.so").touch()
    spec = importlib.machinery.ModuleSpec("horovod", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(HorovodMissing, match=r"without tensorflow.*build-horovod --tensorflow"):
        horovod.load("tensorflow")
