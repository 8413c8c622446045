"""One process without a launcher and without ``init``: bit for bit as without hvdsync."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvdsync.errors import HvdsyncError

SCRIPT = Path(__file__).with_name("alone.py")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_wrapped_training_is_bit_identical_to_plain_keras(backend):
    pytest.importorskip(f"horovod.{backend}")
    root = SCRIPT.parents[3]
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(root),
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_another_backend_is_refused_in_one_sentence(monkeypatch):
    pytest.importorskip("horovod.tensorflow")
    import keras

    module = importlib.import_module("hvdsync.keras._backend")
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    message = "found the Keras backend 'jax', expected 'tensorflow' or 'torch'"
    with pytest.raises(HvdsyncError, match=message):
        module._load()
