"""``hvdsync.torch`` offers what ``horovod.torch`` offers, under the same names and signatures."""

import inspect

import pytest

horovod_torch = pytest.importorskip("horovod.torch")
import hvdsync.torch as hvd  # noqa: E402


def public_names(module):
    return {
        n for n in dir(module) if not n.startswith("_") and not inspect.ismodule(getattr(module, n))
    }


def test_every_public_name_is_there():
    missing = public_names(horovod_torch) - {"check_extension"} - public_names(hvd)
    assert missing == set()
    assert public_names(horovod_torch.elastic) - {"run_fn", "init", "shutdown"} <= public_names(
        hvd.elastic
    )


def test_every_signature_begins_as_horovods():
    """Keyword arguments may be added; none may be missing, renamed or moved."""
    different = {}
    for name in public_names(horovod_torch) & public_names(hvd):
        theirs, ours = getattr(horovod_torch, name), getattr(hvd, name)
        if not inspect.isroutine(theirs) or ours is theirs or name in ("init", "shutdown"):
            continue
        expected = list(inspect.signature(theirs).parameters)
        found = list(inspect.signature(ours).parameters)
        if found[: len(expected)] != expected:
            different[name] = (expected, found)
    assert different == {}


def test_compression_has_horovods_compressors():
    assert hvd.Compression.none and hvd.Compression.fp16
