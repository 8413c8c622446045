"""Compressors by name, what they are called, and what does not go together with them."""

import pytest
import torch

from hvdsync.sync.compression import describe, torch_compression
from hvdsync.sync.compression.onebit import OneBit
from hvdsync.sync.compression.powersgd import PowerSGD, as_matrix
from hvdsync.sync.compression.topk import TopK
from hvdsync.sync.options import check_compression, momentum_of

Compression = torch_compression(torch)


@pytest.mark.parametrize(
    ("text", "compressor"),
    [
        ("none", Compression.none),
        ("fp16", Compression.fp16),
        ("bf16", Compression.bf16),
        ("onebit", OneBit()),
        ("topk", TopK(0.01)),
        ("topk:0.05", TopK(0.05)),
        ("topk:0.05,0.9", TopK(0.05, 0.9)),
        ("powersgd:2", PowerSGD(2)),
        ("powersgd:2,1000", PowerSGD(2, 1000)),
    ],
)
def test_a_name_gives_its_compressor(text, compressor):
    assert Compression.named(text) == compressor


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("zip", "'zip'; expected one of none, fp16, bf16, powersgd, topk, onebit"),
        ("fp16:2", "fp16 takes no argument"),
        ("onebit:2", "onebit takes no argument"),
        ("topk:many", "expected numbers, topk:ratio,momentum"),
        ("topk:0.1,0.9,1", "expected topk:ratio,momentum, or less"),
        ("topk:0", "ratio is 0.0; expected a share"),
        ("topk:0.5", "no fewer bytes than half precision"),
        ("topk:0.1,1", "momentum is 1.0; expected 0 or more and below 1"),
        ("powersgd:0", "rank is 0; expected 1 or more"),
        ("powersgd:1.5", "expected numbers, powersgd:rank,start_step"),
        ("powersgd:1,-1", "start_step is -1; expected 0 or more"),
    ],
)
def test_a_name_that_makes_no_sense_is_refused_with_the_reason(text, reason):
    with pytest.raises(ValueError, match=reason):
        Compression.named(text)


def test_ranks_compare_compressors_by_what_they_do():
    assert describe(Compression.none) == "NoneCompressor"
    assert describe(Compression.bf16) == "bfloat16"
    assert describe(Compression.powersgd(2)) == "PowerSGD(rank=2, start_step=0)"
    assert describe(Compression.topk(0.1)) != describe(Compression.topk(0.2))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_halves_of_single_tensors_keep_horovods_contract(name):
    compressor = getattr(Compression, name)
    wire, ctx = compressor.compress(torch.tensor([1.5, -2.0]))
    assert wire.element_size() == 2
    assert torch.equal(compressor.decompress(wire, ctx), torch.tensor([1.5, -2.0]))
    whole = torch.tensor([1, 2])
    wire, ctx = compressor.compress(whole)
    assert wire is whole and compressor.decompress(wire, ctx) is whole


def test_matrices_are_cut_at_output_channels():
    assert as_matrix((64, 32, 3, 3)) == (64, 288)  # PyTorch
    assert as_matrix((3, 3, 32, 64)) == (288, 64)  # Keras
    assert as_matrix((10,)) == (1, 10)
    assert as_matrix(()) == (1, 1)


def test_powersgd_leaves_out_what_it_would_not_halve():
    assert PowerSGD(2).compresses((64, 64))
    assert not PowerSGD(17).compresses((64, 64))
    assert not PowerSGD(1).compresses((4096,)) and not PowerSGD(1).compresses((2, 100))


@pytest.mark.parametrize(
    ("compressor", "options", "reason"),
    [
        (OneBit(), {"adds": False}, "weighs each rank's whole gradients"),
        (Compression.bf16, {"adds": False}, "weighs each rank's whole gradients"),
        (PowerSGD(), {"engine": "ddp"}, "only none, fp16 and bf16 fit"),
        (TopK(), {"elastic": True}, "lost with a worker"),
        (TopK(0.1, 0.9), {"momentum": 0.5}, "would count twice"),
    ],
)
def test_combinations_without_sense_are_refused_with_the_reason(compressor, options, reason):
    check_compression(compressor)
    check_compression(Compression.none, **options)
    with pytest.raises(ValueError, match=reason):
        check_compression(compressor, **options)


def test_halves_go_with_ddp_and_elastic_jobs():
    for compressor in (Compression.fp16, Compression.bf16):
        check_compression(compressor, engine="ddp", elastic=True, momentum=0.9)
    check_compression(Compression.fp16, adds=False)


def test_the_momentum_of_an_optimizer_is_that_of_its_groups():
    groups = [{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(2)]
    groups[1]["momentum"] = 0.5
    assert momentum_of(torch.optim.SGD(groups, 0.1)) == 0.5
    assert momentum_of(torch.optim.Adam([torch.zeros(1, requires_grad=True)])) == 0
