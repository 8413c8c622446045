"""Which elements of a ``tf.data`` pipeline this rank reads: the whole data set in, its part out.

Works through the data set's own methods; TensorFlow is not imported.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from hvdsync.comm import verbs
from hvdsync.errors import DataError

logger = logging.getLogger(__name__)

# What `tf.data.Dataset.cardinality` gives for an endless data set, and when it does not know.
_INFINITE, _UNKNOWN = -1, -2


def shard(
    dataset: Any,
    uneven: str = "pad",
    *,
    rank: int | None = None,
    size: int | None = None,
    length: int | None = None,
) -> Any:
    """Every ``size``-th element of the data set, starting with the ``rank``-th.

    Call it before ``batch``. All ranks must see the elements in one order: a ``shuffle`` before it
    needs a seed equal on all ranks; a ``shuffle`` after it needs none.

    Arguments:
        dataset: the whole ``tf.data.Dataset``, the same on all ranks.
        uneven: what to do when the number of elements does not divide by ``size``. ``"pad"`` reads
            some elements twice, so that all ranks have equally many; ``"drop"`` leaves the last
            ones out; ``"exact"`` reads each once, so that ranks may differ by one (for
            evaluation; a training step on one rank alone would wait for the others).
        rank, size: default those of the run.
        length: number of elements, where TensorFlow does not know it (after ``filter``, or from
            a generator); without it they are counted by reading the data set once.

    Nothing travels. Raises :class:`DataError` for an unknown policy or an empty data set. Stands
    for ``tf.data.Dataset.shard``.
    """
    if uneven not in ("pad", "drop", "exact"):
        raise DataError(f"shard: uneven is {uneven!r}; expected 'pad', 'drop' or 'exact'")
    index: int = verbs.rank() if rank is None else rank
    count: int = verbs.size() if size is None else size
    if count == 1:
        return dataset
    if uneven == "exact":
        return dataset.shard(count, index)
    total = _length(dataset) if length is None else length
    if total is None:  # endless: nobody runs out
        return dataset.shard(count, index)
    if total == 0:
        raise DataError(f"shard: rank {index} of {count} found a data set of 0 elements")
    rest = total % count
    if rest == 0:
        return dataset.shard(count, index)
    if index == 0:
        action = f"{count - rest} are read twice" if uneven == "pad" else f"{rest} are left out"
        logger.info("%d elements over %d ranks, uneven=%r: %s", total, count, uneven, action)
    if uneven == "drop":
        return dataset.take(total - rest).shard(count, index)
    return dataset.repeat().take(total - rest + count).shard(count, index)


def _length(dataset: Any) -> int | None:
    cardinality = int(dataset.cardinality())
    if cardinality == _INFINITE:
        return None
    if cardinality == _UNKNOWN:
        logger.info("shard: TensorFlow does not know the length; the data set is read to count it")
        return int(dataset.reduce(np.int64(0), lambda n, *_: n + 1))
    return cardinality
