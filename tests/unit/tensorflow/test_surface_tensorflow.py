"""``hvdsync.tensorflow`` offers what ``horovod.tensorflow`` offers, with the same signatures."""

import inspect

import pytest

horovod_tensorflow = pytest.importorskip("horovod.tensorflow")
import hvdsync.tensorflow as hvd  # noqa: E402


def public_names(module):
    return {
        n for n in dir(module) if not n.startswith("_") and not inspect.ismodule(getattr(module, n))
    }


def test_every_public_name_is_there():
    assert public_names(horovod_tensorflow) - public_names(hvd) == set()
    assert set(horovod_tensorflow.elastic.__all__) <= set(hvd.elastic.__all__)


def test_every_signature_begins_as_horovods():
    """Keyword arguments may be added; none may be missing, renamed or moved."""
    different = {}
    for name in public_names(horovod_tensorflow):
        theirs, ours = getattr(horovod_tensorflow, name), getattr(hvd, name)
        if not inspect.isroutine(theirs) or ours is theirs or name in ("init", "shutdown"):
            continue
        expected = inspect.signature(theirs).parameters
        found = inspect.signature(ours).parameters
        if list(found)[: len(expected)] != list(expected):
            different[name] = (list(expected), list(found))
        for key, parameter in expected.items():
            empty = parameter.default is inspect.Parameter.empty
            assert empty == (found[key].default is inspect.Parameter.empty), (name, key)
    assert different == {}


@pytest.mark.parametrize(
    "name",
    [
        *("distribute", "loss_scale", "average_metrics", "agree_any", "agree_all", "Checkpoint"),
        *("rank_zero_only", "rank_zero_first", "DistributedSampler", "shard", "Compression"),
        *("scale_learning_rate", "warmup", "broadcast_object", "allgather_object"),
    ],
)
def test_the_verbs_of_all_front_doors_are_there(name):
    assert callable(getattr(hvd, name)) or name == "Compression"
