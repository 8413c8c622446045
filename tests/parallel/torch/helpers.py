"""What several test files of this folder need: equality over ranks, and the plain counterpart."""

import copy

import torch

from tests.parallel.ranks import assert_equal_arrays_on_all_ranks


def assert_equal_on_all_ranks(tensors):
    """Bit for bit, whatever the dtype."""
    tensors = [t.detach().cpu().contiguous() for t in tensors]
    assert_equal_arrays_on_all_ranks(
        [t.reshape(-1).view(torch.uint8).reshape(*t.shape, -1).numpy() for t in tensors]
    )


def plain_copy(model):
    """The same weights, in a model that no wrapper has touched."""
    return copy.deepcopy(model)
