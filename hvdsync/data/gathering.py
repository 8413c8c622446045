"""Results of samples that were dealt out, from all ranks in, all of them in original order out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from hvdsync.comm import verbs
from hvdsync.data.arrays import Array
from hvdsync.errors import DataError


def gather_in_order(values: Any, indices: Iterable[int], length: int | None = None) -> Array:
    """The results of all samples, each once, in the order of the data set, on every rank.

    Collective. With ``DistributedSampler(..., uneven="exact")`` no sample is there twice; of those
    that "pad" reads twice the first reader's result is taken.

    Arguments:
        values: this rank's results, array-like (n, ...), one for each index.
        indices: the samples that they belong to, as the sampler gave them: n numbers.
        length: how many samples there are; by default the largest index, plus one.

    Gives an array (length, ...). On the wire: one all-gather of the pickled arrays. Raises
    :class:`DataError` on every rank when a rank has another number of values than of indices, or
    samples are missing.
    """
    own = np.asarray(values), np.fromiter(indices, np.int64)
    parts = verbs.allgather_object(own, "hvdsync.gather_in_order")
    for rank, (results, of) in enumerate(parts):
        if len(results) != len(of):
            raise DataError(
                f"gather_in_order: rank {rank} gave {len(results)} values for {len(of)} indices"
            )
    order = np.concatenate([of for _, of in parts])
    total = int(order.max(initial=-1)) + 1 if length is None else length
    # Of equal indices the first is found: the lowest rank that read the sample.
    present, first = np.unique(order, return_index=True)
    if not np.array_equal(present, np.arange(total)):
        _raise_incomplete(present, total)
    # A rank without samples cannot know the shape of a result.
    results = np.concatenate([results for results, of in parts if len(of)])
    gathered: Array = results[first]
    return gathered


def _raise_incomplete(present: Sequence[int] | Array, total: int) -> None:
    missing = np.setdiff1d(np.arange(total), present)
    beyond = np.setdiff1d(present, np.arange(total))
    said = [
        f"{len(which)} of {total} samples {what} ({', '.join(map(str, which[:5]))}"
        f"{', ...' if len(which) > 5 else ''})"
        for what, which in (("have no result", missing), ("are none of the data set", beyond))
        if len(which)
    ]
    raise DataError(
        f"gather_in_order: {'; '.join(said)}; evaluate with uneven='exact' and give the indices "
        "that the sampler gave"
    )
