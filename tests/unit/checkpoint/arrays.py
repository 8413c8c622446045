"""A codec over one NumPy array, for tests that need no framework."""

import numpy as np

from hvdsync.checkpoint.checkpoint import Checkpoint
from hvdsync.checkpoint.codec import Codec


class Box:
    """Stands for a model."""

    def __init__(self, value=0.0, size=4):
        self.array = np.full(size, value)


class BoxCodec(Codec):
    def handles(self, obj):
        return isinstance(obj, Box)

    def snapshot(self, name, obj):
        return obj.array.copy()

    def view(self, name, obj):
        return obj.array

    def write(self, folder, name, snapshot):
        np.save(folder / f"{name}.npy", snapshot)

    def read(self, folder, name, obj):
        return np.load(folder / f"{name}.npy", allow_pickle=False)

    def apply(self, obj, tree):
        obj.array[...] = tree


def checkpoint(directory, codec=None, **arguments):
    return Checkpoint(directory, codec=codec or BoxCodec(), **arguments)
