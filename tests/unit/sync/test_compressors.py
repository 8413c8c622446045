"""What compressors have to do, on arrays of both frameworks; golden values by plain NumPy."""

import functools
import importlib
import math

import ml_dtypes
import numpy as np
import pytest

from hvdsync.sync.compression import tensorflow_compression, torch_compression
from hvdsync.sync.compression.onebit import OneBit
from hvdsync.sync.compression.powersgd import PowerSGD, as_matrix
from hvdsync.sync.compression.tensorflow_arrays import TensorFlowArrays
from hvdsync.sync.compression.topk import TopK
from hvdsync.sync.compression.torch_arrays import TorchArrays
from tests.compression_ranks import Ranks

SHAPES = ((40, 30), (30,), (4, 7, 2, 24))
TAIL = 3
SIZES = [math.prod(shape) for shape in SHAPES]
WHOLE = 30 + TAIL

LOSSY = pytest.mark.parametrize(
    "compressor", [TopK(0.05), TopK(0.05, 0.9), OneBit(), PowerSGD(2)], ids=repr
)
WITHOUT_MOMENTUM = pytest.mark.parametrize(
    "compressor", [TopK(0.05), OneBit(), PowerSGD(2)], ids=repr
)


@pytest.fixture(params=["torch", "tensorflow"])
def framework(request):
    return importlib.import_module(request.param)


@pytest.fixture
def compression(framework):
    make = torch_compression if framework.__name__ == "torch" else tensorflow_compression
    return make(framework)


@pytest.fixture
def ranks(framework):
    """Makes :class:`Ranks` of a compressor, shapes and a number of ranks."""
    if framework.__name__ == "torch":
        arrays = TorchArrays(framework), framework.as_tensor, framework.Tensor.numpy
    else:
        arrays = TensorFlowArrays(framework), framework.constant, np.array
    return functools.partial(Ranks, *arrays)


def gradients(count, steps=3, size=None):
    random = np.random.default_rng(0)
    size = sum(SIZES) + TAIL if size is None else size
    return random.standard_normal((steps, count, size)).astype(np.float32)


def mean(rows):
    return np.mean(rows, 0, dtype=np.float64)


def parts(flat):
    return np.split(flat, np.cumsum(SIZES))


def test_fp16_sends_two_bytes_an_element_and_averages(ranks, compression):
    world = ranks(compression.fp16, SHAPES, 4)
    (given,) = gradients(4, 1)
    found = world.step(given)
    np.testing.assert_array_equal(
        found, np.sum([(g / 4).astype(np.float16) for g in given], 0, np.float16)
    )
    np.testing.assert_allclose(found, mean(given), atol=4e-3)
    assert world.sent_bytes == 2 * given.shape[1] and world.kinds == ["sum"]


def test_fp16_sums_cannot_overflow(ranks, compression):
    # Their sum is beyond the end of half precision, their mean is not.
    found = ranks(compression.fp16, (), 4).step(np.full((4, 5), 60_000, np.float32))
    np.testing.assert_array_equal(found, np.full(5, 60_000))


def test_bf16_sends_two_bytes_an_element_and_adds_up_in_full_precision(ranks, compression):
    world = ranks(compression.bf16, SHAPES, 3)
    (given,) = gradients(3, 1)
    found = world.step(given)
    rounded = np.sum([g.astype(ml_dtypes.bfloat16).astype(np.float32) for g in given], 0) / 3
    np.testing.assert_allclose(found, rounded, rtol=2**-8)
    assert np.array_equal(found, found.astype(ml_dtypes.bfloat16))
    share = math.ceil(given.shape[1] / 3)
    assert world.kinds == ["alltoall", "gather"]
    assert world.sent_bytes == 3 * 2 * share + 2 * share


def test_bf16_has_the_range_of_float32(ranks, compression):
    found = ranks(compression.bf16, (), 2).step(np.full((2, 5), 1e38, np.float32))
    np.testing.assert_allclose(found, 1e38, rtol=2**-8)


def test_topk_sends_the_largest_and_remembers_the_rest(ranks):
    ratio = 0.1
    world = ranks(TopK(ratio), SHAPES, 2)
    steps = gradients(2)
    counts = [math.ceil(ratio * size) for size in (SIZES[0], SIZES[2])]
    errors = [np.zeros(world.sizes[0] + SIZES[2], np.float32) for _ in range(2)]
    for number, given in enumerate(steps, 1):
        expected = mean(given)
        for place, count in ((0, counts[0]), (2, counts[1])):
            start, sent = sum(SIZES[:place]), np.zeros(SIZES[place])
            own = slice(0, SIZES[0]) if place == 0 else slice(SIZES[0], None)
            for rank in range(2):
                total = errors[rank][own] + given[rank][start : start + SIZES[place]]
                chosen = np.argsort(-abs(total))[:count]
                sent[chosen] += total[chosen]
                total[chosen] = 0
                errors[rank][own] = total
            expected[start : start + SIZES[place]] = sent / 2
        np.testing.assert_allclose(world.step(given), expected, rtol=1e-6, atol=1e-7)
        assert world.sent_bytes == number * (8 * sum(counts) + 4 * WHOLE)
    for rank in range(2):
        first, none, third = world.remembered()[rank]
        assert none is None
        np.testing.assert_allclose(np.concatenate([first, third]), errors[rank], rtol=1e-6)
    assert world.kinds == ["gather"] * 3


def test_topk_of_many_elements_is_exact(ranks):
    size, ratio = 60_000, 0.01
    world = ranks(TopK(ratio), ((size,),), 1)
    (given,) = gradients(1, 1, size)
    # Most of a sample in a row of zeros says nothing of the rest; the result is the same.
    for values in (given[0], np.where(np.arange(size) < 100, given[0], 0).astype(np.float32)):
        world = ranks(TopK(ratio), ((size,),), 1)
        found = world.step([values])
        least = np.sort(abs(values))[-math.ceil(ratio * size)]
        np.testing.assert_array_equal(found, np.where(abs(values) >= least, values, 0))


def test_topk_corrects_momentum(ranks):
    shape, ratio, momentum = (32, 32), 0.1, 0.9
    world = ranks(TopK(ratio, momentum), (shape,), 1)
    velocity, total = np.zeros(1024), np.zeros(1024)
    for (given,) in gradients(1, 4, 1024):
        velocity = momentum * velocity + given
        total = total + velocity
        chosen = np.argsort(-abs(total))[: math.ceil(ratio * 1024)]
        expected = np.zeros(1024)
        expected[chosen] = total[chosen]
        velocity[chosen] = total[chosen] = 0
        np.testing.assert_allclose(world.step([given]), expected, rtol=1e-5, atol=1e-6)


def test_onebit_sends_signs_and_one_scale(ranks):
    world = ranks(OneBit(), SHAPES, 2)
    errors = [[np.zeros(size) for size in SIZES] for _ in range(2)]
    for number, given in enumerate(gradients(2), 1):
        expected = mean(given)
        for place in (0, 2):
            start, sent = sum(SIZES[:place]), 0
            for rank in range(2):
                total = errors[rank][place] + given[rank][start : start + SIZES[place]]
                own = abs(total).mean() * np.where(total >= 0, 1, -1)
                errors[rank][place] = total - own
                sent = sent + own
            expected[start : start + SIZES[place]] = sent / 2
        np.testing.assert_allclose(world.step(given), expected, rtol=1e-5, atol=1e-6)
        assert world.sent_bytes == number * (1200 // 8 + 1344 // 8 + 4 * 2 + 4 * WHOLE)
    assert world.kinds == ["gather"] * 3


def test_powersgd_is_power_iteration_with_error_feedback(ranks):
    rank = 2
    world = ranks(PowerSGD(rank), SHAPES, 2)
    assert as_matrix(SHAPES[2]) == (56, 24)
    matrices = {0: (40, 30), 2: (56, 24)}
    errors = [{i: np.zeros(s) for i, s in matrices.items()} for _ in range(2)]
    # The first approximation starts from random columns, which the arrays tell.
    q = {i: a for i, a in enumerate(world.remembered("q")[0]) if a is not None}
    assert {i: a.shape for i, a in q.items()} == {0: (30, 2), 2: (24, 2)}
    for number, given in enumerate(gradients(2), 1):
        expected = mean(given)
        for i, shape in matrices.items():
            total = [errors[r][i] + parts(given[r])[i].reshape(shape) for r in range(2)]
            base, _ = np.linalg.qr(mean([t @ q[i] for t in total]))
            own = [t.T @ base for t in total]
            q[i] = mean(own)
            for r in range(2):
                errors[r][i] = total[r] - base @ own[r].T
            parts(expected)[i][:] = (base @ q[i].T).reshape(-1)
        np.testing.assert_allclose(world.step(given), expected, rtol=1e-3, atol=1e-4)
        sent = rank * (40 + 56) + WHOLE + rank * (30 + 24)
        assert world.sent_bytes == number * 4 * sent
    assert world.kinds == ["sum", "sum"] * 3


def test_powersgd_is_exact_for_matrices_of_its_rank(ranks):
    random = np.random.default_rng(1)
    u, v = random.standard_normal((50, 2)), random.standard_normal((40, 2))
    world = ranks(PowerSGD(2), ((50, 40),), 2)
    given = np.stack([(u @ v.T).reshape(-1)] * 2).astype(np.float32)
    np.testing.assert_allclose(world.step(given), given[0], rtol=1e-3, atol=1e-4)


@WITHOUT_MOMENTUM
def test_what_was_not_sent_is_kept(ranks, compressor):
    """What arrived and what is remembered add up to all gradients, over any number of steps."""
    world = ranks(compressor, SHAPES, 2)
    steps = gradients(2, 5)
    arrived = sum(world.step(given).astype(np.float64) for given in steps)
    wanted = parts(steps.astype(np.float64).sum(0).mean(0))
    for i, (found, expected) in enumerate(zip(parts(arrived), wanted, strict=True)):
        kept = [errors[i] for errors in world.remembered()] if i < len(SHAPES) else [None]
        if kept[0] is not None:
            assert any(abs(error).max() > 0.1 for error in kept)
            found = found + mean(kept)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@LOSSY
def test_what_is_not_finite_is_seen(ranks, compressor):
    for bad in (np.nan, np.inf):
        given = gradients(2, 1)[0]
        given[1, 7] = bad
        found = parts(ranks(compressor, SHAPES, 2).step(given))
        assert not np.isfinite(found[0]).all()
        assert np.isfinite(found[1]).all() and np.isfinite(found[3]).all()


@LOSSY
def test_zeros_stay_zeros(ranks, compressor):
    world = ranks(compressor, SHAPES, 2)
    nothing = np.zeros((2, sum(SIZES) + TAIL), np.float32)
    assert not world.step(nothing).any()
    (given,) = gradients(2, 1)
    assert np.isfinite(world.step(given)).all()
