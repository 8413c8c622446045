"""A rank whose Horovod, and MPI with it, is told to end while it adds to a window."""

import threading

import numpy as np

import hvdsync.torch as hvd
from hvdsync.comm import windows

hvd.init()
# Two operations for MPI.
LENGTH = 100_000
vector = windows.SharedVector(windows.connect(), LENGTH, np.float32)
vector.become(np.zeros(LENGTH, np.float32), root=0)
ending = threading.Thread(target=hvd.shutdown)


class Ones:
    """Of the second operation, known only when MPI has had a second to end."""

    values = np.ones(LENGTH, np.float32)

    def __getitem__(self, place):
        if place.start and ending.ident is None:
            ending.start()
            ending.join(1.0)
        return self.values[place]


before = np.full(LENGTH, 7, np.float32)
vector.add(Ones(), before)
assert not before.any()
ending.join()
print("added", flush=True)
vector.add(Ones(), before)
