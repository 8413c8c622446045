"""Update rules as descriptions: when fragments are due, how parameters are cut, what is refused."""

import numpy as np
import pytest

from hvdsync.sync.compression import Compressor, NoneCompressor
from hvdsync.sync.compression.casts import HalfPrecision
from hvdsync.sync.options import check_combination
from hvdsync.sync.update_rules import DiLoCo, LocalSGD, Synchronous, cut


def due(rule, fragment, steps=16):
    return [step for step in range(rule.warmup_steps + 1, steps + 1) if rule.is_due(step, fragment)]


def test_a_period_is_counted_from_the_end_of_the_warmup():
    assert due(LocalSGD(4), 0) == [4, 8, 12, 16]
    assert due(LocalSGD(4, warmup_steps=3), 0) == [7, 11, 15]
    assert due(LocalSGD(1), 0) == list(range(1, 17))


def test_fragments_are_due_in_turn():
    rule = DiLoCo(6, fragments=3)
    assert [due(rule, i) for i in range(3)] == [[6, 12], [4, 10, 16], [2, 8, 14]]
    uneven = LocalSGD(5, fragments=3)
    together = [step for i in range(3) for step in due(uneven, i)]
    assert len(set(together)) == len(together)


def test_the_outer_step_is_sgd_with_nesterov_momentum():
    anchor, momentum = np.array([1.0, 2.0]), np.zeros(2)
    first, second = np.array([0.5, -1.0]), np.array([0.25, 0.0])
    anchor, momentum = DiLoCo(1, 0.7, 0.9).outer_step(anchor, momentum, first)
    np.testing.assert_allclose(anchor, [1 - 0.7 * 1.9 * 0.5, 2 + 0.7 * 1.9])
    before = anchor
    anchor, momentum = DiLoCo(1, 0.7, 0.9).outer_step(anchor, momentum, second)
    velocity = 0.9 * first + second
    np.testing.assert_allclose(momentum, velocity)
    np.testing.assert_allclose(anchor, before - 0.7 * (second + 0.9 * velocity))


@pytest.mark.parametrize(
    ("sizes", "parts", "runs"),
    [
        ([4] * 8, 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([100, 1, 1, 1], 2, [[0], [1, 2, 3]]),
        ([1, 1, 100], 2, [[0, 1], [2]]),
        ([1, 1, 100], 3, [[0], [1], [2]]),
        ([5, 5], 4, [[0], [1]]),
        ([0, 0, 0], 2, [[0, 1], [2]]),
        ([], 3, []),
    ],
)
def test_parameters_are_cut_into_runs_of_about_equal_sums(sizes, parts, runs):
    assert cut(sizes, parts) == runs


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalSGD(0), r"period is 0; expected 1 or more"),
        (lambda: LocalSGD(4, warmup_steps=-1), r"warmup_steps is -1"),
        (lambda: LocalSGD(4, fragments=5), r"fragments is 5; expected 1 up to the period, 4"),
        (lambda: DiLoCo(4, fragments=0), r"DiLoCo: fragments is 0"),
        (lambda: DiLoCo(4, 0.0), r"outer_lr is 0.0"),
        (lambda: DiLoCo(4, outer_momentum=1.0), r"outer_momentum is 1.0"),
    ],
)
def test_values_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_only_local_rules_come_back():
    assert check_combination(None) is None
    assert check_combination(Synchronous(), averages=False, engine="ddp", elastic=True) is None
    assert check_combination(LocalSGD(3)) == LocalSGD(3)
    halves = HalfPrecision(None, None)
    assert check_combination(DiLoCo(3), compression=halves) == DiLoCo(3)


@pytest.mark.parametrize(
    ("update", "options", "reason"),
    [
        ("local-sgd", {}, r"update is 'local-sgd'; expected None, Synchronous"),
        (LocalSGD(3), {"engine": "ddp"}, "averages gradients in every backward pass"),
        (DiLoCo(3), {"averages": False}, "a mean and no sum"),
        (LocalSGD(3), {"everyone": False}, "over all ranks"),
        (DiLoCo(3), {"elastic": True}, "takes its steps with it"),
        (
            LocalSGD(3),
            {"compression": HalfPrecision(None, None)},
            "compression=float16: parameters themselves travel",
        ),
        (DiLoCo(3), {"compression": Compressor}, "error feedback is that of the gradients"),
    ],
)
def test_combinations_without_sense_are_refused_with_the_reason(update, options, reason):
    options = {"compression": NoneCompressor, **options}
    with pytest.raises(ValueError, match=reason):
        check_combination(update, **options)
