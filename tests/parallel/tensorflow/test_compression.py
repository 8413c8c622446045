"""Compressed gradients of TensorFlow between real ranks: what travels, arrives, is remembered."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd
from tests.parallel.cases import matrix_but
from tests.parallel.ranks import shard
from tests.parallel.tensorflow.helpers import assert_equal_on_all_ranks, values
from tests.parallel.wire_bytes import sent_bytes

ALL = [
    "none",
    "fp16",
    "bf16",
    "onebit",
    "topk:0.05",
    "topk:0.05,0.9",
    "powersgd:2",
    "powersgd:2,3",
]


def net():
    model = keras.Sequential(
        [keras.Input((40,)), keras.layers.Dense(60, "tanh"), keras.layers.Dense(3)]
    )
    random = np.random.default_rng(0)
    for variable in model.variables:
        variable.assign(random.normal(size=variable.shape, scale=0.1))
    return model


def batches(steps):
    random = np.random.default_rng(1)
    return [
        (random.normal(size=(8, 40)).astype("f"), random.normal(size=(8, 3)).astype("f"))
        for _ in range(steps)
    ]


def loss_of(model, x, y):
    return tf.reduce_mean((model(x) - y) ** 2)


def optimizing(name, lr=0.02, **options):
    """A model, its optimizer, and a compiled step."""
    model = net()
    model, optimizer = hvd.distribute(
        model, keras.optimizers.SGD(lr), compression=hvd.Compression.named(name), **options
    )

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    return model, optimizer, step


@pytest.mark.parametrize("name", matrix_but(["bf16", "topk:0.05,0.9", "powersgd:2,3"], ALL))
def test_bytes_are_those_of_the_formula_and_ranks_stay_equal(name):
    model, optimizer, step = optimizing(name)

    def loss():
        return sum(float(loss_of(model, x, y)) for x, y in batches(4))

    before = loss()
    for x, y in batches(4) * 8:
        step(*map(tf.constant, shard(x, y)))
    assert loss() < 0.9 * before
    assert_equal_on_all_ranks(model.variables)
    if hvd.size() > 1:
        assert optimizer.sent_bytes == sent_bytes(name, hvd.size(), 32)


@pytest.mark.usefixtures("several_ranks")
@pytest.mark.parametrize(
    ("name", "op", "compiled"),
    [
        ("onebit", hvd.Average, True),
        ("topk:0.05", hvd.Average, False),
        ("powersgd:2", hvd.Sum, True),
    ],
)
def test_what_arrived_and_what_is_kept_are_all_gradients(name, op, compiled):
    model = net()
    wanted = [np.zeros(v.shape) for v in model.variables]
    arrived = [np.zeros(v.shape) for v in model.variables]
    compression = hvd.Compression.named(name)

    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_of(model, x, y)
        own = tape.gradient(loss, model.trainable_variables)
        # A name of its own: tapes of one name remember together.
        tape = hvd.DistributedGradientTape(
            tape, compression=compression, op=op, name=f"kept.{compiled}"
        )
        return own, tape.gradient(loss, model.trainable_variables)

    if compiled:
        step = tf.function(step)
    for x, y in batches(4):
        own, reduced = step(*map(tf.constant, shard(x, y)))
        for i, (one, all_) in enumerate(zip(own, reduced, strict=True)):
            wanted[i] += hvd.allreduce(one, op=op).numpy()
            arrived[i] += all_.numpy()
    large = 0
    lost = wanted[large] - arrived[large]
    assert abs(lost).max() > 1e-3
    for found, expected in zip(arrived[1:], wanted[1:], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    reducer = _reducer_of_the_last_tape()
    memory = reducer.memory
    (state,) = (s for n, s in memory._states.items() if n.endswith(f".{large}"))
    kept = hvd.allreduce(tf.identity(state["error"]), op=op).numpy().reshape(lost.shape)
    np.testing.assert_allclose(kept, lost, rtol=1e-3, atol=1e-4)


def _reducer_of_the_last_tape():
    from hvdsync.tensorflow import tape

    return list(tape._reducers.values())[-1]


@pytest.mark.usefixtures("several_ranks")
@pytest.mark.parametrize("name", ["topk:0.05,0.9", "powersgd:2"])
def test_a_step_that_a_guard_skips_is_not_remembered(name):
    model, optimizer, step = optimizing(name, guard=hvd.Guard(on_nonfinite="skip"))
    ((x, y),) = batches(1)
    step(*map(tf.constant, shard(x, y)))
    memory = optimizer._sharing.reducer.memory
    remembered = [v for state in memory._states.values() for v in state.values()]
    assert remembered
    weights, before = values(model.variables), values(remembered)
    scale = math.nan if hvd.rank() == hvd.size() - 1 else 1.0
    step(*map(tf.constant, shard(x * scale, y)))
    for found, expected in zip(values(model.variables), weights, strict=True):
        np.testing.assert_array_equal(found, expected)
    for found, expected in zip(values(remembered), before, strict=True):
        np.testing.assert_array_equal(found, expected)
    step(*map(tf.constant, shard(x, y)))
    assert all(np.isfinite(v).all() for v in values(model.variables))


@pytest.mark.usefixtures("several_ranks")
def test_another_model_of_the_same_names_inherits_nothing():
    def first_gradient():
        keras.backend.clear_session()
        model = net()
        ((x, y),) = batches(1)
        x, y = shard(x, y)
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.onebit, name="twice")
        return tape.gradient(loss, model.trainable_variables)[0].numpy()

    np.testing.assert_array_equal(first_gradient(), first_gradient())


@pytest.mark.usefixtures("several_ranks")
def test_numbers_whose_sum_overflows_half_precision_arrive():
    variable = tf.Variable([6e4, 1.0])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(variable * [6e4, 1.0])
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
    np.testing.assert_array_equal(tape.gradient(y, variable), [6e4, 1.0])


def test_combinations_without_sense_are_refused():
    with pytest.raises(ValueError, match="weighs each rank's whole"):
        hvd.DistributedGradientTape(
            tf.GradientTape(), compression=hvd.Compression.topk(0.1), op=hvd.Adasum
        )
    with pytest.raises(ValueError, match="it would count twice"):
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9),
            compression=hvd.Compression.topk(0.1, momentum=0.9),
        )


@pytest.mark.parametrize("name", ["onebit", "powersgd:2,2"])
def test_a_run_from_a_checkpoint_comes_to_the_bits_of_one_that_did_not_stop(name, shared_path):
    def begin():
        keras.backend.clear_session()
        return optimizing(name)

    def train(step, steps):
        for x, y in batches(steps):
            step(*map(tf.constant, shard(x, y)))

    model, optimizer, step = begin()
    train(step, 3)
    with hvd.Checkpoint(shared_path) as checkpoint:
        feedback = hvd.ErrorFeedback(optimizer)
        checkpoint.save(3, model=model, optimizer=optimizer, feedback=feedback)
    train(step, 3)
    expected = values(model.variables)
    # One that has met its tensors, and one that has not.
    for steps_before in (1, 0):
        model, optimizer, step = begin()
        train(step, steps_before)
        with hvd.Checkpoint(shared_path) as checkpoint:
            feedback = hvd.ErrorFeedback(optimizer)
            checkpoint.restore(model=model, optimizer=optimizer, feedback=feedback)
        train(step, 3)
        for found, wanted in zip(values(model.variables), expected, strict=True):
            np.testing.assert_array_equal(found, wanted)
