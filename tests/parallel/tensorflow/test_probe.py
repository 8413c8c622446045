"""A rank that computes wrong numbers is named by the probe, in TensorFlow (2 and 4 ranks)."""

import numpy as np
import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd
from hvdsync.errors import HvdsyncError, SilentCorruption
from tests.parallel.keras_nets import noisy_net
from tests.parallel.tensorflow.helpers import values


def batch():
    return np.random.default_rng(hvd.rank()).normal(size=(6, 5)).astype("float32"), [tf.ones([6])]


def loss(model, batch):
    x, (y,) = batch
    return tf.reduce_mean(tf.square(model(x, training=True)[:, 0] - y))


def wrong(rank, factor=1.5):
    return lambda model, batch: loss(model, batch) * (factor if hvd.rank() == rank else 1.0)


def test_ranks_that_compute_alike_pass_and_the_model_stays_as_it_was():
    model = noisy_net()
    before = values(model.variables)
    probe = hvd.CorruptionProbe(loss, every=1)
    for _ in range(3):
        assert probe.check(model, batch()) == ()
    for found, expected in zip(values(model.variables), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_rank_that_computes_wrong_numbers_is_named():
    if hvd.size() < 2:
        pytest.skip("one rank")
    with pytest.raises(SilentCorruption) as error:
        hvd.CorruptionProbe(wrong(1), every=1).check(noisy_net(), batch())
    text = str(error.value)
    assert len(set(hvd.allgather_object(text.partition(": ")[2]))) == 1
    assert "kernel' (float32 (5, 7))" in text
    if hvd.size() == 2:
        assert "one of two ranks computes wrong numbers" in text
    else:
        assert "rank 1 computes wrong numbers" in text and "ranks 0, 2 agree" in text


def test_a_rank_that_does_not_reproduce_itself_is_named():
    calls = []

    def unsteady(model, batch):
        calls.append(1)
        return loss(model, batch) * (len(calls) if hvd.rank() == 0 else 1.0)

    with pytest.raises(SilentCorruption, match="rank 0 computes wrong numbers: given the same"):
        hvd.CorruptionProbe(unsteady, every=1).check(noisy_net(), batch())


def test_modules_of_tensorflow_are_probed():
    module = tf.Module()
    module.weights = tf.Variable([1.0, 2.0])
    module.count = tf.Variable(3.0, trainable=False)

    def loss(module, batch):
        module.count.assign_add(1.0)
        return tf.reduce_sum(module.weights * batch * module.count)

    assert hvd.CorruptionProbe(loss, every=1).check(module, tf.constant([1.0, 2.0])) == ()
    assert float(module.count) == 3.0


def test_inside_a_function_it_says_where_to_call_it():
    probe = hvd.CorruptionProbe(loss, every=1)
    model = noisy_net()
    with pytest.raises(HvdsyncError, match=r"tf\.function"):
        tf.function(lambda: probe.check(model, batch()))()
