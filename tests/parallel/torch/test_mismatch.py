"""Ranks that give one name different tensors: the error says at once which, what, and who."""

import ctypes

import pytest
import torch
from horovod.torch.mpi_ops import _basics

import hvdsync.torch as hvd
from hvdsync.errors import RankMismatch

pytestmark = pytest.mark.usefixtures("several_ranks")


def odd():
    """Whether this is rank 1, the one that differs."""
    return hvd.rank() == 1


def others():
    """The ranks that agree, as an error lists them."""
    ranks = [rank for rank in range(hvd.size()) if rank != 1]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


CASES = {
    "shape": (
        lambda: hvd.allreduce(torch.ones(3 if odd() else 2), name="same"),
        "'allreduce.same': shape [2] on {}, but [3] on rank 1;",
    ),
    "dtype": (
        lambda: hvd.allreduce(torch.ones(2, dtype=(torch.int32, torch.int64)[odd()]), name="same"),
        "'allreduce.same': dtype int32 on {}, but int64 on rank 1;",
    ),
    "two things": (
        lambda: hvd.allreduce(
            torch.ones(2 + odd(), dtype=(torch.int32, torch.int64)[odd()]), name="same"
        ),
        "dtype int32 on {0}, but int64 on rank 1; shape [2] on {0}, but [3] on rank 1;",
    ),
    "reduction": (
        lambda: hvd.allreduce(torch.ones(2), name="same", op=(hvd.Sum, hvd.Max)[odd()]),
        "'allreduce.same': reduction sum on {}, but max on rank 1;",
    ),
    "operation": (
        lambda: hvd.allreduce(torch.ones(2), name="same", op=(hvd.Sum, hvd.Adasum)[odd()]),
        "'allreduce.same': operation ALLREDUCE on {}, but ADASUM on rank 1;",
    ),
    "gathered shape": (
        lambda: hvd.allgather(torch.ones(1 + hvd.rank(), 3 if odd() else 2), name="same"),
        "'allgather.same': shape [any, 2] on {}, but [any, 3] on rank 1;",
    ),
    "root": (
        lambda: hvd.broadcast(torch.ones(2), int(odd()), name="same"),
        "'broadcast.same': root rank 0 on {}, but 1 on rank 1;",
    ),
    "one of a group": (
        lambda: hvd.grouped_allreduce([torch.ones(2), torch.ones(3 if odd() else 2)], name="same"),
        "shape [2] on {}, but [3] on rank 1;",
    ),
    "waited for": (
        lambda: hvd.synchronize(hvd.allreduce_async(torch.ones(2 + odd()), name="same")),
        "'allreduce.same': shape [2] on {}, but [3] on rank 1;",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_is_told_the_name_the_values_and_the_ranks(case):
    if case == "operation" and hvd.size() & (hvd.size() - 1):
        pytest.skip("Adasum is for powers of two")
    call, message = CASES[case]
    with pytest.raises(RankMismatch) as caught:
        call()
    assert message.format(others()) in str(caught.value)
    assert str(caught.value).startswith(f"rank {hvd.rank()}: ranks disagree about the tensor '")
    # Scripts written for Horovod catch this.
    assert isinstance(caught.value, RuntimeError)
    # Nothing is broken: the next one goes through.
    assert hvd.allreduce(torch.ones(2), name="same", op=hvd.Sum).tolist() == [hvd.size()] * 2


def test_a_root_that_differs_is_told_for_a_name_that_is_known():
    # Horovod remembers what it has agreed on under a name.
    for _ in range(3):
        assert hvd.broadcast(torch.full((2,), hvd.rank()), 0, name="known").tolist() == [0, 0]
    with pytest.raises(RankMismatch, match=r"root rank 0 on .*, but 1 on rank 1;"):
        hvd.broadcast(torch.ones(2), int(odd()), name="known")
    # All may go over to another root.
    assert hvd.broadcast(torch.full((2,), hvd.rank()), 1, name="known").tolist() == [1, 1]


def pending(capacity=10_000):
    text = ctypes.create_string_buffer(capacity)
    needed = _basics.MPI_LIB_CTYPES.horovod_pending_tensors(text, capacity)
    return text.value.decode(), needed


def test_what_is_submitted_and_not_complete_is_listed():
    handles = []
    if not odd():
        handles = [hvd.allreduce_async(torch.ones(2), name=name) for name in ("one", "two")]
        text, needed = pending()
        sets, ages, names = zip(*(line.split("\t") for line in text.splitlines()), strict=True)
        assert names == ("allreduce.one", "allreduce.two")
        assert sets == ("0", "0") and all(0 <= int(age) < 60_000 for age in ages)
        assert needed == len(text)
        # As much as there is room for, and a NUL; before the age, which changes.
        assert pending(3)[0] == text[:2] == "0\t" and pending(3)[1] >= needed
    else:
        assert pending() == ("", 0)
        handles = [hvd.allreduce_async(torch.ones(2), name=name) for name in ("one", "two")]
    for handle in handles:
        hvd.synchronize(handle)
    assert pending() == ("", 0)
