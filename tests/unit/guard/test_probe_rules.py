"""Who meets whom in a probe, and what counts as another result."""

import numpy as np
import pytest

from hvdsync.errors import SilentCorruption
from hvdsync.guard.probe import CorruptionProbe, _differ, _pair


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_every_rank_meets_every_other(ranks):
    pairs = [_pair(number, ranks) for number in range(ranks * (ranks - 1))]
    assert {frozenset(pair) for pair in pairs} == {
        frozenset((a, b)) for a in range(ranks) for b in range(a)
    }
    assert set(_pair(0, ranks) + _pair(1, ranks)) <= set(range(ranks))


def test_one_rank_meets_itself_only():
    assert _pair(5, 1) == (0,)


def results(*values, dtype=np.float32):
    return [("a", np.array(v, dtype)) for v in values]


def test_differences_within_the_tolerance_of_the_greatest_are_none():
    assert _differ(results([1.0, 100.0]), results([1.009, 100.0]), 1e-4) == ""
    text = _differ(results([1.0, 100.0]), results([1.02, 100.0]), 1e-4)
    assert "'a' (float32 (2,))" in text and "in 1 of 2 elements, by at most 0.02" in text
    assert "0.01 is the tolerance" in text


def test_a_gradient_that_is_rounding_only_is_measured_by_the_others():
    kernel = ("kernel", np.ones(3))
    ours, theirs = ([("bias", np.array([noise])), kernel] for noise in (1e-8, -3e-8))
    assert _differ(ours, theirs, 1e-4) == ""
    assert "'bias'" in _differ(ours, [("bias", np.array([1e-5])), kernel], 1e-4)


def test_what_is_not_finite_differs_unless_it_is_the_same():
    nan, inf = float("nan"), float("inf")
    assert _differ(results([nan, inf, 1.0]), results([nan, inf, 1.0]), 0) == ""
    assert "more than any number" in _differ(results([nan, 1.0]), results([1.0, 1.0]), 1.0)
    assert "more than any number" in _differ(results([inf, 1.0]), results([-inf, 1.0]), 1.0)


def test_the_first_tensor_that_differs_is_named_and_shapes_count():
    ours = [("a", np.ones(2)), ("b", np.ones(2)), ("c", np.zeros(0))]
    theirs = [("a", np.ones(2)), ("b", np.zeros(2)), ("c", np.ones(3))]
    assert "'b'" in _differ(ours, theirs, 1e-4)
    assert "'c'" in _differ(ours[2:], theirs[2:], 1e-4)


class Scripted:
    """Gives prepared results in turn, in place of computing."""

    def __init__(self, *values):
        self.values = list(values)

    def portable(self, batch):
        return batch

    def state(self):
        return None

    def put(self, state):
        pass

    def parameters(self):
        return []

    def gradients(self, batch, seed):
        return results(self.values.pop(0))


def test_a_rank_alone_is_told_when_it_does_not_reproduce_itself():
    probe = CorruptionProbe(lambda model, batch: None, every=2)
    assert probe._check(Scripted(), "batch") == ()
    assert probe._check(Scripted([1.0], [1.0]), "batch") == ()
    assert probe._check(Scripted(), "batch") == ()
    with pytest.raises(SilentCorruption) as error:
        probe._check(Scripted([1.0], [2.0]), "batch")
    text = str(error.value)
    assert text.startswith("rank 0 of 1: step 4: rank 0 computes wrong numbers")
    assert "given the same batch twice" in text
    assert "go back to a checkpoint of step 2 or before" in text


def test_values_out_of_range_are_refused():
    for options in ({"every": 0}, {"tolerance": -1.0}, {"on_corruption": "ignore"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            CorruptionProbe(lambda model, batch: None, **options)
