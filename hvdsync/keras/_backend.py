"""The part of ``hvdsync.keras`` that belongs to the backend Keras runs on."""

from __future__ import annotations

import importlib
from types import ModuleType

import keras

from hvdsync.errors import HvdsyncError

_MODULES = {"tensorflow": "hvdsync.keras._tensorflow", "torch": "hvdsync.keras._torch"}


def _load() -> ModuleType:
    name = keras.backend.backend()
    if name not in _MODULES:
        raise HvdsyncError(
            f"hvdsync.keras: found the Keras backend {name!r}, expected 'tensorflow' or 'torch'; "
            "set the environment variable KERAS_BACKEND before Keras is imported"
        )
    return importlib.import_module(_MODULES[name])


backend = _load()
