"""The verbs that all front doors share, over PyTorch's Horovod."""

import math

import numpy as np
import pytest
import torch

import hvdsync.torch as hvd
from hvdsync.comm import trees
from hvdsync.errors import HvdsyncError, RankMismatch


def test_one_true_flag_is_any_and_one_false_flag_is_not_all():
    only_last = hvd.rank() == hvd.size() - 1
    assert hvd.agree_any(only_last)
    assert not hvd.agree_any(False)
    assert hvd.agree_all(True)
    assert hvd.agree_all(only_last) == (hvd.size() == 1)


def test_metrics_are_weighted_by_samples():
    """Accuracies .9 over 100 samples and .1 over 10 elsewhere."""
    accuracy, samples = (0.9, 100) if hvd.rank() == 0 else (0.1, 10)
    others = hvd.size() - 1
    expected = (0.9 * 100 + 0.1 * 10 * others) / (100 + 10 * others)
    averaged = hvd.average_metrics({"accuracy": accuracy, "count": 1}, weight=samples)
    assert averaged == {"accuracy": pytest.approx(expected, rel=1e-12), "count": 1.0}


def test_a_rank_of_weight_zero_does_not_count():
    value = 2.0 if hvd.rank() == 0 else math.nan
    assert hvd.average_metrics({"m": value}, weight=int(hvd.rank() == 0)) == {"m": 2.0}
    with pytest.raises(ValueError, match="weights of all ranks are 0"):
        hvd.average_metrics({"m": 1.0}, weight=0)


def test_different_metric_names_are_refused_on_every_rank():
    if hvd.size() == 1:
        pytest.skip("one rank cannot differ from itself")
    metrics = {"loss": 1.0} if hvd.rank() == 0 else {"loss": 1.0, "accuracy": 1.0}
    with pytest.raises(RankMismatch, match=r"rank 0: loss; rank 1: accuracy, loss"):
        hvd.average_metrics(metrics)


def test_objects_travel_to_and_from_all_ranks():
    root = hvd.size() - 1
    sent = {"rank": hvd.rank(), "array": np.arange(hvd.rank() + 1)}
    got = hvd.broadcast_object(sent, root_rank=root)
    assert got["rank"] == root and got["array"].tolist() == list(range(root + 1))
    everyone = hvd.allgather_object("x" * hvd.rank())
    assert everyone == ["x" * r for r in range(hvd.size())]


def test_rank_zero_only_runs_on_rank_zero_alone():
    calls = []
    result = hvd.rank_zero_only(lambda value: calls.append(value) or "done")(5)
    assert (calls, result) == (([5], "done") if hvd.rank() == 0 else ([], None))


def test_the_first_rank_of_a_host_goes_first(shared_path):
    flag = shared_path / "made"
    with hvd.rank_zero_first():
        if hvd.local_rank() == 0:
            assert not flag.exists()
            flag.touch()
        assert flag.exists()


def test_a_first_rank_that_fails_lets_no_other_wait():
    expected = ZeroDivisionError if hvd.local_rank() == 0 else HvdsyncError
    with pytest.raises(expected), hvd.rank_zero_first():
        _ = 1 // 0


def test_streams_longer_than_a_chunk_arrive_whole(monkeypatch):
    monkeypatch.setattr(trees, "CHUNK_BYTES", 7)
    lengths = [3, 0, 20, 1, 7, 6]
    buffers = [np.full(n, i + 1 if hvd.rank() == 0 else 0, np.uint8) for i, n in enumerate(lengths)]
    trees.broadcast_buffers(buffers, 0, "test.stream")
    assert [b.tolist() for b in buffers] == [[i + 1] * n for i, n in enumerate(lengths)]


def test_raw_operations_of_horovod_pass_through():
    total = hvd.allreduce(torch.ones(3) * hvd.rank(), op=hvd.Sum, name="raw")
    assert total.tolist() == [sum(range(hvd.size()))] * 3


@pytest.mark.parametrize("length", [1, 7, 8, 9, 1003])
def test_halves_are_summed_as_numbers_and_rounded_to_the_nearest(length):
    # Multiples of the smallest number, which are exact, and at the end what is none or too large.
    multiples = torch.arange(length) % 13 - 6
    own = (2.0**-24 * (hvd.rank() + 1) * multiples).half()
    ranks = hvd.size() * (hvd.size() + 1) / 2
    expected = (2.0**-24 * ranks * multiples).half()
    last = length % 3
    own[-1] = [65504, math.inf, math.nan][last]
    expected[-1] = [65504 if hvd.size() == 1 else math.inf, math.inf, math.nan][last]
    found = hvd.allreduce(own, op=hvd.Sum, name=f"halves {length}")
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_sum_of_halves_between_two_halves_becomes_the_even_one():
    if hvd.size() != 2:
        pytest.skip("sums of more are rounded more than once")
    own = torch.tensor([2048.0, 2050.0] * 5 if hvd.rank() == 0 else [1.0] * 10).half()
    assert hvd.allreduce(own, op=hvd.Sum, name="ties").tolist() == [2048.0, 2052.0] * 5


def test_learning_rate_scales_with_the_number_of_workers():
    n = hvd.size()
    assert hvd.scale_learning_rate(0.1) == pytest.approx(0.1 * n)
    assert hvd.scale_learning_rate(0.1, rule="sqrt") == pytest.approx(0.1 * n**0.5)
    assert hvd.scale_learning_rate(0.1, rule=None) == 0.1
    curve = hvd.warmup(4, after=lambda step: 0.5**step)
    assert curve(0) == pytest.approx(1 / n)
    assert curve(2) == pytest.approx((1 / n + 1) / 2)
    assert [curve(4), curve(5), curve(6)] == [1.0, 0.5, 0.25]
