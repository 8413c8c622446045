"""Momentum is scaled when the learning rate changes, and not touched when it is set again."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from hvdsync.keras.callbacks import set_rate


def stepped(rate: float) -> keras.optimizers.SGD:
    """An optimizer that has taken a step."""
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    weights = keras.Variable(np.linspace(-1, 1, 100, dtype=np.float32))
    optimizer.apply([weights * 0.3], [weights])
    return optimizer


def momentum(optimizer: keras.optimizers.SGD) -> np.ndarray:
    return keras.ops.convert_to_numpy(optimizer.momentums[0]).copy()


# The quotient of the first rate and its float32 is not 1 in float32.
@pytest.mark.parametrize("rate", [0.05 * 2**0.5, 0.1, 1e-3])
def test_the_same_rate_set_again_changes_no_bit(rate: float) -> None:
    optimizer = stepped(rate)
    before = momentum(optimizer)
    set_rate(optimizer, rate, correct_momentum=True)
    np.testing.assert_array_equal(momentum(optimizer), before)


def test_another_rate_scales_momentum_with_it() -> None:
    optimizer = stepped(0.1)
    before = momentum(optimizer)
    set_rate(optimizer, 0.25, correct_momentum=False)
    np.testing.assert_array_equal(momentum(optimizer), before)
    set_rate(optimizer, 0.5, correct_momentum=True)
    np.testing.assert_allclose(momentum(optimizer), 2 * before, rtol=1e-6)
