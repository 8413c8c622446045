"""Ranks that disagree about a tensor get the same error, whichever backend Keras has."""

import numpy as np
import pytest

import hvdsync.keras as hvd
from hvdsync.errors import RankMismatch

pytestmark = pytest.mark.usefixtures("several_ranks")


@pytest.mark.parametrize(
    "call",
    [
        lambda shape: hvd.allreduce(np.ones(shape, np.float32), name="same"),
        lambda shape: hvd.allgather(np.ones((1, *shape), np.float32), name="same"),
        lambda shape: hvd.broadcast(np.ones(shape, np.float32), 0, name="same"),
    ],
    ids=["allreduce", "allgather", "broadcast"],
)
def test_every_rank_is_told_the_values_and_the_ranks(call):
    shape = (3,) if hvd.rank() == 1 else (2,)
    with pytest.raises(RankMismatch, match=r"shape \[.*2\] on ranks? 0.* but \[.*3\] on rank 1;"):
        call(shape)
