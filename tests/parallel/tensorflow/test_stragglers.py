"""The rank that holds the others up is named, and why; what the others wait is no computing."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd
from tests.parallel import slowness
from tests.parallel.cases import matrix_but
from tests.parallel.tensorflow.helpers import loss_of, make_model

STEPS = 12


@pytest.mark.usefixtures("several_ranks")
# Why a rank is slow is told alike in every framework, and in full in PyTorch's suite.
@pytest.mark.parametrize("case", matrix_but(["busy step", "sleeping loader"], slowness.CASES))
def test_a_slow_rank_is_named_with_what_it_does(case, tmp_path):
    slow = hvd.rank() == hvd.size() - 1
    where = slowness.CASES[case][0]
    path = slowness.make_file(tmp_path)
    model, optimizer = hvd.distribute(make_model(), keras.optimizers.SGD(0.01))
    x, y = np.ones((4, 5), np.float32), np.ones((4, 1), np.float32)

    def slow_step(array):
        slowness.slow_down(case, path)
        return array

    @tf.function
    def train_step(x, y):
        if slow and where == "step":
            x = tf.ensure_shape(tf.numpy_function(slow_step, [x], tf.float32), x.shape)
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def load():
        for _ in range(STEPS + 1):
            if slow and where == "loader":
                slowness.slow_down(case, path)
            yield x, y

    stragglers, report = hvd.Stragglers(every=STEPS), None
    for batch in stragglers.watch(load()):
        train_step(*map(tf.constant, batch))
        report = stragglers.step() or report
    slowness.assert_verdict(report, case, hvd.size())
