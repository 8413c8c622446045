"""Learning-rate scaling and warm-up as functions of the optimizer step."""

import pytest

from hvdsync.sync.schedule import scale_learning_rate, warmup


def test_one_worker_keeps_the_rate():
    assert [scale_learning_rate(0.1, rule) for rule in ("linear", "sqrt", None)] == [0.1] * 3
    with pytest.raises(ValueError, match="cubic"):
        scale_learning_rate(0.1, "cubic")


def test_warmup_rises_in_a_straight_line_then_hands_over():
    factor = warmup(4, start=0.2, after=lambda step: 10.0 + step)
    assert [factor(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 10.0, 11.0])


def test_no_warmup_starts_at_the_full_rate():
    assert warmup(0, start=0.1)(0) == 1.0
    with pytest.raises(ValueError, match="-1"):
        warmup(-1)
