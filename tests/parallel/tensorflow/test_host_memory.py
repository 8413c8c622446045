"""Gradients of ranks on one host, through the memory that they have in common."""

import time

import numpy as np
import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd
from hvdsync.comm.host_memory import SWITCH
from hvdsync.sync.tensorflow_host_sum import TensorSum

INPUTS, UNITS = 300, 30


@pytest.fixture
def used(monkeypatch):
    """Shapes of what goes through it, by graph."""
    sent = []
    in_graph = TensorSum.in_graph

    def noted(self, tensors):
        sent.append([tuple(tensor.shape) for tensor in tensors])
        return in_graph(self, tensors)

    monkeypatch.setattr(TensorSum, "in_graph", noted)
    return sent


def make_step(graph, units=UNITS):
    kernel, bias = tf.Variable(tf.zeros((INPUTS, units))), tf.Variable(tf.zeros(units))

    def step(factor):
        with tf.GradientTape() as tape:
            loss = factor * tf.reduce_sum(tf.ones((1, INPUTS)) @ kernel + bias)
        return hvd.DistributedGradientTape(tape).gradient(loss, [kernel, bias])

    return tf.function(step) if graph else step


@pytest.mark.parametrize("graph", [True, False])
def test_every_step_of_ranks_of_one_host_goes_through_it(several_ranks, used, graph):
    step = make_step(graph)
    mean_of_ranks = (hvd.size() + 1) / 2
    kept = []
    for turn in range(1, 4):
        kernel, bias = step(tf.constant(turn * (hvd.rank() + 1.0)))
        kept.append((turn, kernel, bias))
    # Those of earlier steps too: nothing has overwritten them.
    for turn, kernel, bias in kept:
        np.testing.assert_allclose(kernel, np.full((INPUTS, UNITS), turn * mean_of_ranks))
        np.testing.assert_allclose(bias, np.full(UNITS, turn * mean_of_ranks))
    assert used
    assert sorted(used[0]) == [(UNITS,), (INPUTS, UNITS)]


def test_ranks_have_not_waited_longer_than_they_trained(several_ranks):
    kernel = tf.Variable(tf.zeros((INPUTS, UNITS)))
    reducing = []

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(kernel)
        tape = hvd.DistributedGradientTape(tape)
        reducing.append(tape)
        return tape.gradient(loss, [kernel])

    step()
    (tape,) = reducing
    before, started = tape.waited_seconds, time.perf_counter()
    if hvd.rank() == 0:
        time.sleep(0.2)  # which the others wait for
    step()
    assert tape.waited_seconds - before <= time.perf_counter() - started


def test_one_rank_that_does_not_want_it_is_enough(several_ranks, used, monkeypatch):
    if hvd.rank() == hvd.size() - 1:
        monkeypatch.setenv(SWITCH, "0")
    # Of another size: for tensors of the same names and sizes it would be decided already.
    kernel, _ = make_step(True, units=7)(tf.constant(hvd.rank() + 1.0))
    np.testing.assert_allclose(kernel, np.full((INPUTS, 7), (hvd.size() + 1) / 2))
    assert used == []


def test_joined_ranks_count_as_zeros(several_ranks, used):
    step = make_step(True)
    step(tf.constant(1.0))
    for turn in range(hvd.rank() + 1):
        kernel, _ = step(tf.constant(1.0))
        expected = (hvd.size() - turn) / hvd.size()
        np.testing.assert_allclose(kernel, np.full((INPUTS, UNITS), expected))
    hvd.join()
    np.testing.assert_allclose(step(tf.constant(1.0))[0], np.ones((INPUTS, UNITS)))
    assert used
