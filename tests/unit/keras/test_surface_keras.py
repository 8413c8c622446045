"""``hvdsync.keras`` offers what ``horovod.keras`` and ``horovod.tensorflow.keras`` offer."""

import inspect

import pytest

pytest.importorskip("horovod.tensorflow")
import horovod.keras
import horovod.tensorflow.keras

import hvdsync.keras as hvd

THEIRS = [horovod.keras, horovod.tensorflow.keras]


def public_names(module):
    return {
        n
        for n in dir(module)
        if not n.startswith("_")
        and not inspect.ismodule(getattr(module, n))
        # What Horovod only imports for itself.
        and n != "is_version_greater_equal_than"
    }


@pytest.mark.parametrize("theirs", THEIRS, ids=lambda m: m.__name__)
def test_every_public_name_is_there(theirs):
    assert public_names(theirs) - public_names(hvd) == set()
    assert public_names(theirs.callbacks) <= public_names(hvd.callbacks)
    assert public_names(theirs.elastic) - {"TensorFlowKerasState"} <= public_names(hvd.elastic)


@pytest.mark.parametrize("theirs", THEIRS, ids=lambda m: m.__name__)
def test_every_argument_is_taken_under_its_name(theirs):
    """The two modules put them in different orders; positions are those of the newer one."""
    for module, ours in (
        (theirs, hvd),
        (theirs.callbacks, hvd.callbacks),
        (theirs.elastic, hvd.elastic),
    ):
        for name in public_names(module) & public_names(ours):
            mine = getattr(ours, name)
            if not callable(mine) or name in ("init", "shutdown", "ProcessSet", "Compression"):
                continue
            try:
                expected = inspect.signature(getattr(module, name)).parameters
            except (TypeError, ValueError):
                continue
            found = inspect.signature(mine).parameters
            assert set(expected) - {"args", "kwargs"} <= set(found), name
            if theirs is horovod.tensorflow.keras:
                assert list(found)[: len(expected)] == list(expected), name


@pytest.mark.parametrize(
    "name",
    [
        *("distribute", "loss_scale", "average_metrics", "agree_any", "agree_all", "Checkpoint"),
        *("rank_zero_only", "rank_zero_first", "DistributedSampler", "shard", "Compression"),
        *("scale_learning_rate", "warmup", "broadcast_object", "allgather_object"),
        "broadcast_variables",
    ],
)
def test_the_verbs_of_all_front_doors_are_there(name):
    assert callable(getattr(hvd, name)) or name == "Compression"
