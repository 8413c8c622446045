"""N ranks on shards of a batch train to the weights of one plain process on the whole batch."""

import keras
import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd
from tests.parallel.cases import matrix_but, thinned
from tests.parallel.keras_nets import (
    OPTIMIZERS,
    PLAIN_NETS,
    ConvNet,
    RankZeroNet,
    TiedNet,
    assert_parity,
    batches,
)
from tests.parallel.ranks import shard
from tests.parallel.tensorflow.helpers import assert_equal_on_all_ranks

WAYS = ["tape", "optimizer", "eager"]


def train(model, optimizer, data, way="plain"):
    """``tape``: a wrapped tape and a plain optimizer; else what ``optimizer`` is."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        if way == "tape":
            tape = hvd.DistributedGradientTape(tape)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    run = step if way == "eager" else tf.function(step)
    for x, y in data:
        run(tf.constant(x), tf.constant(y))


def check(make_net, make_reference, make_optimizer, way):
    reference, plain = make_reference().start(), make_optimizer()
    data = batches(reference)
    train(reference, plain, data, "eager" if way == "eager" else "plain")

    model, optimizer = make_net().start(), make_optimizer()
    if way == "tape":
        optimizer.build(model.trainable_variables)
        hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
    else:
        model, optimizer = hvd.distribute(model, optimizer)
    train(model, optimizer, [shard(*batch) for batch in data], way)
    assert_parity(
        [*model.variables, *optimizer.variables], [*reference.variables, *plain.variables]
    )
    assert_equal_on_all_ranks([*model.variables, *optimizer.variables])


@pytest.mark.parametrize(("kind", "way"), thinned(OPTIMIZERS, WAYS))
def test_every_optimizer_reaches_the_weights_of_one_process(kind, way):
    check(TiedNet, TiedNet, OPTIMIZERS[kind], way)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(("net", "way"), thinned(PLAIN_NETS, WAYS))
def test_unusual_models_reach_the_weights_of_one_process(net, way):
    check(PLAIN_NETS[net], PLAIN_NETS[net], OPTIMIZERS["sgd"], way)


@pytest.mark.parametrize("way", matrix_but(["optimizer"], WAYS))
def test_batch_norm_over_all_ranks_reaches_the_weights_and_averages_of_one_process(way):
    def synchronized():
        return ConvNet(hvd.SyncBatchNormalization)

    # Not Adam: it would blow up the rounding of the bias whose gradient normalisation makes 0.
    check(synchronized, ConvNet, OPTIMIZERS["sgd"], way)


@pytest.mark.parametrize("way", matrix_but(["tape", "optimizer"], WAYS))
def test_a_layer_that_rank_zero_alone_uses_gets_its_gradient_on_all_ranks(way):
    check(RankZeroNet, lambda: RankZeroNet(whole=True), OPTIMIZERS["sgd"], way)


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_one_rank_alone_looks_up_are_gathered_from_it(way):
    """The embedding is not part of the other ranks' losses at all: they send no rows."""
    table = tf.Variable(tf.ones((6, 2), tf.float64))
    scale = tf.Variable(tf.constant(1.0, tf.float64))
    optimizer = keras.optimizers.SGD(1.0)
    if way != "tape":
        optimizer = hvd.DistributedOptimizer(optimizer)

    def step():
        with tf.GradientTape() as tape:
            loss = scale * 2.0
            if hvd.rank() == 0:
                loss += tf.reduce_sum(tf.gather(table, tf.constant([1, 4, 1])))
        if way == "tape":
            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, [table, scale])
        assert isinstance(gradients[0], tf.IndexedSlices) or way != "tape"
        optimizer.apply_gradients(zip(gradients, [table, scale], strict=True))

    (step if way == "eager" else tf.function(step))()
    expected = [[1, 1], [1 - 2 / hvd.size()] * 2, [1, 1], [1, 1], [1 - 1 / hvd.size()] * 2, [1, 1]]
    tf.debugging.assert_near(table, tf.constant(expected, tf.float64))
    assert float(scale) == -1.0


def test_one_rank_may_retrace_a_function_for_a_batch_of_another_shape():
    """The other ranks keep their graphs and are not asked again."""
    weight = tf.Variable(1.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    traced = []

    @tf.function
    def step(x):
        traced.append(x.shape)
        with tf.GradientTape() as tape:
            loss = weight * tf.reduce_mean(x)
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

    step(tf.ones(4))
    before = len(traced)
    step(tf.ones(3 if hvd.rank() == 0 else 4))
    assert len(traced) - before == (hvd.rank() == 0)
    assert float(weight) == -1.0
