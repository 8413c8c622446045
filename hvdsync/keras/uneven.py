"""Ranks with unequal numbers of batches, in Keras ``fit``: data in, data of as many batches out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Literal

import keras
import numpy as np

from hvdsync.comm import world
from hvdsync.data.uneven import Policy, agree_counts, check_policy, log_policy, step_scales
from hvdsync.errors import DataError
from hvdsync.keras._backend import backend

logger = logging.getLogger(__name__)

_ENDLESS = 2**62


def even_batches(
    data: Any, policy: Literal["min", "pad"] = "min", *, batch_size: int | None = None
) -> Any:
    """Data for ``fit`` that has as many batches on every rank, whichever rank has more.

    ```python
    model.fit(hvd.even_batches((x, y), policy="pad", batch_size=32), ...)
    ```

    Arguments:
        data: a ``tf.data.Dataset``, a PyTorch ``DataLoader`` or a ``keras.utils.PyDataset`` of
            batches; or arrays as a tuple (inputs, targets) or (inputs, targets, sample weights),
            cut into batches of ``batch_size``, by default 32, in their order. Its number of batches
            must stay what it is; where it is not known, the data is read once to count them.
        policy: ``"min"`` gives each rank as many batches as the one with fewest has; the rest is
            left out. ``"pad"`` gives as many as the one with most has: a rank that ran out repeats
            a batch with sample weights of 0, and those that have batches are weighted so that the
            average is over them; batches count alike, whatever their sizes. In own loops, the
            ``even_batches`` of ``hvdsync.torch`` and ``hvdsync.tensorflow`` offer ``"join"`` too,
            for which ``fit`` has no place, and count samples.

    With "pad" batches get a third part, the sample weights, so metrics that are not to count what
    is repeated belong into ``weighted_metrics``. What is given back for "pad" is read in order,
    whatever ``shuffle`` says.

    On the wire: one all-gather of 8 bytes a rank, in this call. Rank 0 logs which policy it was and
    what it did. Raises ``DataError`` on every rank when a rank has no batch to repeat, or when data
    that never ends is to be filled up to.
    """
    check_policy(policy)
    if policy == "join":
        raise ValueError(
            "even_batches: policy='join' has no place in fit, each step of which needs a batch; "
            "'pad' comes to the same average, over the ranks that still have batches"
        )
    source = _Source(data, batch_size)
    comm = world.current()
    counts = [source.count] if comm.size == 1 else agree_counts(source.count)
    assert counts is not None
    _refuse(policy, counts)
    if _ENDLESS not in counts and comm.rank == 0:
        log_policy(policy, counts)
    if min(counts) == max(counts) and not source.of_arrays:
        return data
    if policy == "min":
        return source.first(min(counts))
    return source.padded(step_scales(counts, comm.rank))


def _refuse(policy: Policy, counts: list[int]) -> None:
    if policy == "min" or min(counts) == max(counts):
        return
    rank = counts.index(min(counts))
    here = world.current().rank
    if max(counts) == _ENDLESS:
        endless = counts.index(_ENDLESS)
        raise DataError(
            f"rank {here}: even_batches(policy='pad'): rank {endless} has data that never ends, up "
            f"to which rank {rank} with {counts[rank]} batches cannot be filled; choose 'min'"
        )
    if counts[rank] == 0:
        raise DataError(
            f"rank {here}: even_batches(policy='pad'): rank {rank} has no batch at all, so there "
            "is nothing that it could repeat; give it data, or choose policy='min'"
        )


class _Source:
    """Batches of any of the kinds that ``fit`` takes, and how many there are."""

    def __init__(self, data: Any, batch_size: int | None) -> None:
        self.of_arrays = isinstance(data, tuple | list)
        if self.of_arrays:
            data = _Slices(tuple(data), 32 if batch_size is None else batch_size)
        elif batch_size is not None:
            raise ValueError(
                f"even_batches: batch_size is for arrays; {type(data).__name__} has batches already"
            )
        self._data = data
        self.count = self._count()

    def _count(self) -> int:
        if isinstance(self._data, keras.utils.PyDataset):
            batches = self._data.num_batches
            return _ENDLESS if batches is None else int(batches)
        if hasattr(self._data, "cardinality"):
            cardinality = int(self._data.cardinality())
            if cardinality >= -1:
                return _ENDLESS if cardinality == -1 else cardinality
        elif hasattr(self._data, "__len__"):
            return len(self._data)
        logger.info("even_batches: the number of batches is not known; they are read to count them")
        return sum(1 for _ in self._data)

    def first(self, count: int) -> Any:
        """The first ``count`` of them."""
        if isinstance(self._data, keras.utils.PyDataset):
            return _Shortened(self._data, count)
        native = backend.first_batches(self._data, count)
        if native is not None:
            return native
        return backend.make_dataset(lambda: islice(self._batches(), count), count)

    def padded(self, scales: np.ndarray) -> Any:
        """As many as there are ``scales``, each weighted by its own; the last ones are repeated."""

        def batches() -> Iterator[Any]:
            source = self._batches()
            batch: Any = None
            for scale in scales:
                batch = next(source) if scale else batch
                yield with_weights(batch, float(scale))

        native = backend.padded_batches(self._data, self.count, scales, with_weights)
        return backend.make_dataset(batches, len(scales)) if native is None else native

    def _batches(self) -> Iterator[Any]:
        """One pass over them, as NumPy arrays."""
        if not isinstance(self._data, keras.utils.PyDataset):
            for batch in self._data:
                arrays = keras.tree.map_structure(_as_array, batch)
                # A loader's batch may be a list, which to TensorFlow is one array.
                yield tuple(arrays) if isinstance(arrays, list) else arrays
            return
        self._data.on_epoch_begin()
        for index in range(self.count):
            yield self._data[index]
        self._data.on_epoch_end()


class _Slices(keras.utils.PyDataset):
    """Arrays, cut into batches."""

    def __init__(self, arrays: tuple[Any, ...], batch_size: int) -> None:
        super().__init__()
        self._arrays = arrays
        self._batch_size = batch_size
        lengths = {len(array) for array in keras.tree.flatten(arrays)}
        if len(lengths) != 1:
            raise DataError(
                f"rank {world.current().rank}: even_batches found arrays of {sorted(lengths)} "
                "samples; expected as many in each"
            )
        self._length = lengths.pop()

    def __len__(self) -> int:
        return -(-self._length // self._batch_size)

    def __getitem__(self, index: int) -> Any:
        part = slice(index * self._batch_size, (index + 1) * self._batch_size)
        return keras.tree.map_structure(lambda array: array[part], self._arrays)


class _Shortened(keras.utils.PyDataset):
    """The first batches of a ``PyDataset``."""

    def __init__(self, whole: Any, count: int) -> None:
        super().__init__(whole.workers, whole.use_multiprocessing, whole.max_queue_size)
        self._whole = whole
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        return self._whole[index]

    def on_epoch_begin(self) -> None:
        self._whole.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._whole.on_epoch_end()


def with_weights(
    batch: Any, scale: Any, ones: Callable[[Any], Any] = lambda x: np.ones(len(x), np.float32)
) -> tuple[Any, Any, Any]:
    """The batch with its sample weights, 1 where it has none, multiplied by ``scale``.

    ``ones(array)`` gives float32 ones for each sample of an array. Raises ``DataError`` for a batch
    that is not (inputs, targets) or (inputs, targets, sample weights).
    """
    if not isinstance(batch, tuple | list) or len(batch) not in (2, 3):
        raise DataError(
            f"rank {world.current().rank}: even_batches(policy='pad') found a batch of type "
            f"{type(batch).__name__} with no place for sample weights; expected (inputs, targets) "
            "or (inputs, targets, sample weights)"
        )
    x, y, *weights = batch
    given = weights[0] if weights else ones(keras.tree.flatten(x)[0])
    return x, y, keras.tree.map_structure(lambda w: w * scale, given)


def _as_array(value: Any) -> np.ndarray:
    return np.asarray(value.cpu() if hasattr(value, "cpu") else value)
