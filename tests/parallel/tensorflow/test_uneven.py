"""Ranks with unequal numbers of batches end an epoch together, as one process would have it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd
from hvdsync.errors import DataError, HvdsyncError
from tests.parallel.cases import thinned
from tests.parallel.tensorflow.helpers import (
    CLOSE,
    assert_equal_on_all_ranks,
    loss_of,
    make_model,
    values,
)

pytestmark = pytest.mark.usefixtures("several_ranks")


def shares(steps=3, size=6):
    """The batches of each rank: rank r has ``steps + r``, and the last one of each is shorter."""
    rng = np.random.default_rng(3)
    everyone = []
    for rank in range(hvd.size()):
        sizes = [size] * (steps + rank - 1) + [size - 2 - rank % 2]
        rows = [rng.normal(size=(n, 5)).astype("float32") for n in sizes]
        everyone.append([(x, np.tanh(x.sum(1, keepdims=True))) for x in rows])
    return everyone


def train_alone(model):
    """One process, on the samples that all ranks together have in each step."""
    optimizer = keras.optimizers.SGD(0.2, momentum=0.9)
    everyone = shares()
    for step in range(len(everyone[-1])):
        present = [batches[step] for batches in everyone if step < len(batches)]
        x, y = (np.concatenate(parts) for parts in zip(*present, strict=True))
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return model


class Looked(keras.layers.Layer):
    """A model with a sparse gradient: rows of a table are looked up by the sign of the input."""

    def build(self, shape):
        self.table = self.add_weight(shape=(2, 4), initializer="ones")
        self.out = self.add_weight(shape=(4, 1), initializer="ones")

    def call(self, x, training=None):
        rows = tf.nn.embedding_lookup(self.table.value, tf.cast(x[:, 0] > 0, tf.int32))
        return tf.matmul(rows * x[:, :4], self.out)


def dense():
    return make_model()


def sparse():
    return keras.Sequential([keras.Input((5,)), Looked()])


@pytest.mark.parametrize(
    ("policy", "mode", "make"), thinned(["pad", "join"], ["graph", "eager"], [dense, sparse])
)
def test_every_batch_counts_once_as_in_one_process(policy, mode, make):
    own = shares()[hvd.rank()]
    model, optimizer = hvd.distribute(make(), keras.optimizers.SGD(0.2, momentum=0.9))

    def step(x, y, scale):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y) * scale
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    train_step = tf.function(step, reduce_retracing=True) if mode == "graph" else step
    batches = hvd.even_batches(own, policy, optimizer=optimizer)
    taken = 0
    for _ in range(2):  # the second pass finds graphs made
        for x, y in batches:
            train_step(tf.constant(x), tf.constant(y), batches.scale)
            taken += 1
    assert taken == 2 * (3 + hvd.size() - 1 if policy == "pad" else len(own))
    assert_equal_on_all_ranks(model.variables)
    assert int(optimizer.iterations) == 2 * (3 + hvd.size() - 1)


@pytest.mark.parametrize(("policy", "make"), thinned(["pad", "join"], [sparse, dense]))
def test_one_pass_ends_with_the_weights_of_one_process(policy, make):
    own = shares()[hvd.rank()]
    model, optimizer = hvd.distribute(make(), keras.optimizers.SGD(0.2, momentum=0.9))

    @tf.function(reduce_retracing=True)
    def train_step(x, y, scale):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y) * scale
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    batches = hvd.even_batches(own, policy, optimizer=optimizer)
    for x, y in batches:
        train_step(tf.constant(x), tf.constant(y), batches.scale)
    for found, expected in zip(
        values(model.trainable_variables),
        values(train_alone(make()).trainable_variables),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.parametrize("known", [True, False])
def test_min_ends_a_data_set_when_the_first_rank_has_no_more(known):
    dataset = tf.data.Dataset.range(3 + hvd.rank())
    if not known:
        dataset = dataset.filter(lambda _: True)
    for _ in range(2):
        assert [int(i) for i in hvd.even_batches(dataset)] == [0, 1, 2]


def test_a_tape_is_weighted_by_the_factor():
    own = shares()[hvd.rank()]
    model = make_model()
    optimizer = keras.optimizers.SGD(0.2, momentum=0.9)
    batches = hvd.even_batches(own, "pad")
    for x, y in batches:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(model, x, y) * batches.scale
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    for found, expected in zip(
        values(model.variables), values(train_alone(make_model()).variables), strict=True
    ):
        np.testing.assert_allclose(found, expected, **CLOSE)


def test_a_factor_that_is_read_inside_a_function_is_an_error_on_every_rank():
    batches = hvd.even_batches([tf.ones(2)] * (4 if hvd.rank() else 2), "pad")

    @tf.function
    def step(x):
        return x * batches.scale

    with pytest.raises(HvdsyncError, match=r"in step 3 rank 0 did not use the factor"):
        for x in batches:
            step(x)


def test_joining_needs_a_step_of_ones_own_and_a_distributed_optimizer():
    _, optimizer = hvd.distribute(make_model(), keras.optimizers.SGD(0.1))
    own = shares()[hvd.rank()] if hvd.rank() else []
    with pytest.raises(DataError, match="rank 0 has no batch at all"):
        list(hvd.even_batches(own, "join", optimizer=optimizer))
    with pytest.raises(ValueError, match="found a plain SGD"):
        hvd.even_batches(own, "join", optimizer=keras.optimizers.SGD(0.1))
    _, several = hvd.distribute(make_model(), keras.optimizers.SGD(0.1), accumulate=2)
    with pytest.raises(ValueError, match="several backward passes"):
        hvd.even_batches(own, "join", optimizer=several)
