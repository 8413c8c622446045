"""Horovod's operations are traced as they are, and nothing is said about that."""

import logging
import types

import pytest

from hvdsync.comm.failures import Explained

tf = pytest.importorskip("tensorflow")


def test_autograph_does_not_warn_of_operations_without_source(caplog):
    library = types.SimpleNamespace()
    # As operations that are loaded from a library have none.
    exec("def double(x): return x + x", vars(library))
    operations = Explained(library)

    @tf.function
    def step(x):
        return operations.double(x)

    with caplog.at_level(logging.WARNING):
        assert step(tf.constant(2.0)) == 4
    assert caplog.records == []
