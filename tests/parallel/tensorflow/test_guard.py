"""Replicas that differ in one bit are found, named and mended, in TensorFlow."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd
from hvdsync.errors import HvdsyncError, RankMismatch, ReplicaMismatch
from tests.parallel.tensorflow.helpers import (
    assert_equal_on_all_ranks,
    batches,
    loss_of,
)

pytestmark = pytest.mark.usefixtures("several_ranks")


def trained(optimizer=None):
    """Equal replicas: every rank sees the same batches, and gradients are averaged."""
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(7),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    optimizer = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
    for x, y in batches(2):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(model, x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model, optimizer


def flip(variable):
    """The lowest mantissa bit of the last element, on the last rank only."""
    if hvd.rank() == hvd.size() - 1:
        value = np.array(variable.numpy(), order="C")
        kind = {2: np.uint16, 4: np.uint32, 8: np.uint64}[value.itemsize]
        value.reshape(-1).view(kind)[-1:] ^= 1
        variable.assign(value)


def mismatch_of(*arguments, **options):
    """What is said, once all ranks have said it."""
    with pytest.raises(ReplicaMismatch) as error:
        hvd.check_replicas(*arguments, **options)
    text = str(error.value)
    assert len(set(hvd.allgather_object(text.partition(": ")[2]))) == 1
    return text


def test_equal_replicas_pass():
    hvd.check_replicas(*trained())


def test_one_flipped_bit_of_a_kernel_is_found_and_measured():
    model, optimizer = trained()
    kernel = model.layers[-1].kernel
    flip(kernel)
    text = mismatch_of(model, optimizer)
    last = hvd.size() - 1
    assert f"{kernel.path!r} (float32 (7, 1))" in text
    assert f"rank {last} differs from" in text
    assert f"rank {last} in 1 of 7 elements, by at most" in text


def test_one_flipped_bit_of_a_moving_average_is_found():
    model, optimizer = trained()
    flip(model.layers[1].moving_mean)
    assert "moving_mean'" in mismatch_of(model, optimizer)
    hvd.check_replicas(model, optimizer, ignore=["*/moving_*"])


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_one_flipped_bit_of_a_slot_is_found(kind):
    rules = {"sgd": lambda: None, "adam": lambda: keras.optimizers.Adam(0.01)}
    model, optimizer = trained(rules[kind]())
    slot = [v for v in optimizer.variables if v.path.endswith("momentum")][-1]
    flip(slot)
    assert repr(slot.path) in mismatch_of(model, optimizer)
    hvd.check_replicas(model)


def test_a_learning_rate_of_one_rank_is_found():
    model, optimizer = trained()
    optimizer.learning_rate = 0.2 if hvd.rank() == 0 else 0.1
    assert "learning_rate'" in mismatch_of(model, optimizer)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_variables_and_modules_of_other_dtypes_are_compared(dtype):
    module = tf.Module()
    module.rows = [tf.Variable(tf.ones((3,), dtype)), tf.Variable(tf.ones((4,), dtype))]
    hvd.check_replicas(module)
    flip(module.rows[1])
    assert "in 1 of 4 elements, by at most" in mismatch_of(module)
    assert "in 1 of 4 elements, by at most" in mismatch_of(module.rows)


def test_repair_makes_replicas_equal_and_says_so_on_rank_zero(caplog):
    model, optimizer = trained()
    everything = [*model.variables, *optimizer.variables]
    expected = hvd.broadcast_object([v.numpy() for v in everything])
    for variable in everything:
        flip(variable)
    guard = hvd.Guard(every=2, on_divergence="repair")
    with caplog.at_level(logging.WARNING, logger="hvdsync.guard"):
        assert not guard.check(model, optimizer)
        assert guard.check(model, optimizer)
    assert (hvd.rank() == 0) == any("kernel" in r.getMessage() for r in caplog.records)
    assert_equal_on_all_ranks(everything)
    for variable, value in zip(everything, expected, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_shape_of_one_rank_is_named_and_not_repaired():
    variable = tf.Variable(tf.ones((3 + (hvd.rank() == 0),)))
    assert "rank 0: float32 (4,), rank 1: float32 (3,)" in mismatch_of([variable])
    with pytest.raises(RankMismatch, match="the variables differ"):
        hvd.Guard(every=1, on_divergence="repair").check([variable])


def test_inside_a_function_it_says_where_to_call_it():
    model, optimizer = trained()

    @tf.function
    def step():
        hvd.check_replicas(model, optimizer)

    with pytest.raises(HvdsyncError, match=r"tf\.function"):
        step()
