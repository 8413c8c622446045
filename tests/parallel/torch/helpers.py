"""What several test files of this folder need: equality over ranks, and the plain counterpart."""

import copy

import torch

import hvdsync.torch as hvd


def assert_equal_on_all_ranks(tensors):
    """Bit for bit: the bytes of each tensor are those of rank 0."""
    mine = [
        t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for t in tensors
    ]
    for rank, theirs in enumerate(hvd.allgather_object(mine)):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert a == b, f"tensor {i} differs between this rank and rank {rank}"


def shard(*batch):
    """This rank's part of a global batch: every size-th sample."""
    return tuple(t[hvd.rank() :: hvd.size()] for t in batch)


def plain_copy(model):
    """The same weights, in a model that no wrapper has touched."""
    return copy.deepcopy(model)
