"""Several ranks of a compressor in one process: collectives are NumPy's, in rank order.

In: a framework's arrays, a compressor, each rank's flat gradients of each step. Out: what every
rank ends with, what it remembers, and the bytes that each rank gave to collectives.
"""

import math

import numpy as np

from hvdsync.sync.compression.exchange import Part
from hvdsync.sync.compression.memory import Memory


class Ranks:
    """``tensor`` and ``array`` turn NumPy arrays into a framework's and back."""

    def __init__(self, xp, tensor, array, compressor, shapes, count):
        self.count = count
        self.sent_bytes = 0
        self.kinds = []
        self.parts = [Part(f"p{i}", shape) for i, shape in enumerate(shapes)]
        self.sizes = [math.prod(shape) for shape in shapes]
        self._xp, self._tensor, self._array = xp, tensor, array
        self._compressor = compressor
        self._memories = [Memory(xp, compressor) for _ in range(count)]

    def step(self, gradients):
        """The mean that all ranks come to, of one flat NumPy array for each."""
        flats = [self._tensor(g) for g in gradients]
        states = [m.recall(self.parts, f) for m, f in zip(self._memories, flats, strict=True)]
        runs = [
            self._compressor.exchange(self._xp, f, self.parts, s, self.count)
            for f, s in zip(flats, states, strict=True)
        ]
        asked = [next(run) for run in runs]
        while True:
            answers = self._travel([c.kind for c in asked], [self._array(c.tensor) for c in asked])
            try:
                asked = [r.send(self._tensor(a)) for r, a in zip(runs, answers, strict=True)]
            except StopIteration as done:
                results = [done.value]
                break
        for run, answer in zip(runs[1:], answers[1:], strict=True):
            try:
                run.send(self._tensor(answer))
            except StopIteration as done:
                results.append(done.value)
        for memory, (_, new) in zip(self._memories, results, strict=True):
            for part, state in zip(self.parts, new, strict=False):
                memory.remember(part, state)
        means = [
            np.concatenate([self._array(p).reshape(-1) for p in pieces]) for pieces, _ in results
        ]
        for mean in means[1:]:
            assert mean.tobytes() == means[0].tobytes()
        return means[0]

    def remembered(self, key="error"):
        """Of each rank: an array of each part, or None where nothing is."""
        return [
            [
                self._array(state[key]) if key in state else None
                for state in memory.recall(self.parts, self._tensor(np.zeros(0, np.float32)))
            ]
            for memory in self._memories
        ]

    def _travel(self, kinds, tensors):
        assert len(set(kinds)) == 1 and len({t.shape for t in tensors}) == 1
        self.kinds.append(kinds[0])
        self.sent_bytes += tensors[0].nbytes
        if kinds[0] == "sum":
            return [np.sum(tensors, 0, dtype=tensors[0].dtype)] * self.count
        if kinds[0] == "gather":
            return [np.stack(tensors)] * self.count
        assert len(tensors[0]) == self.count
        return [np.stack([t[rank] for t in tensors]) for rank in range(self.count)]
