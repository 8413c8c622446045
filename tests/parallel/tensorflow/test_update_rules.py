"""Ranks that take steps alone and meet follow the rule to the number, in graphs and eagerly."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd
from hvdsync.errors import HvdsyncError, RankMismatch, ReplicaMismatch
from tests.parallel import golden_updates as golden
from tests.parallel.cases import matrix_but
from tests.parallel.tensorflow.helpers import assert_equal_on_all_ranks

# The mathematics are those of PyTorch, which make test runs.
pytestmark = pytest.mark.slow


def linear():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.set_weights(golden.initial())
    return model


def sgd():
    return keras.optimizers.SGD(golden.RATE, golden.MOMENTUM)


def distributed(rule, model=None, **options):
    return hvd.distribute(linear() if model is None else model, sgd(), update=rule, **options)


def rule_of(name):
    kind, options = golden.RULES[name]
    return getattr(hvd, kind)(**options)


def stepper(model, optimizer, eager=False):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    step = step if eager else tf.function(step)
    return lambda number: step(*map(tf.constant, golden.batch(hvd.rank(), number)))


def assert_follows(model, expected, step):
    wanted = expected[step][hvd.rank()]
    for variable, values in zip(model.trainable_variables, wanted, strict=True):
        np.testing.assert_allclose(
            variable.numpy(), values, rtol=2e-5, atol=1e-6, err_msg=f"step {step}"
        )


@pytest.mark.parametrize(
    ("name", "eager"),
    matrix_but(
        [("after a warm-up", False), ("all of it", False)],
        [*((name, False) for name in golden.RULES), ("all of it", True)],
    ),
)
def test_every_step_of_each_rank_is_that_of_the_rule(name, eager):
    model, optimizer = distributed(rule_of(name))
    train = stepper(model, optimizer, eager)
    expected = golden.golden(name, hvd.size())
    for step in range(1, golden.STEPS + 1):
        train(step)
        assert_follows(model, expected, step)


def test_gradients_of_several_passes_are_one_local_step():
    model, optimizer = distributed(hvd.LocalSGD(2), accumulate=2)
    train = stepper(model, optimizer)
    expected = golden.trajectory(hvd.size(), 2)
    for step in range(1, 5):
        train(step)
        train(step)
        assert_follows(model, expected, step)


@pytest.mark.parametrize("name", ["all of it"])
def test_an_early_meeting_makes_all_state_equal_and_is_a_step_of_the_rule(name):
    model, optimizer = distributed(rule_of(name))
    train = stepper(model, optimizer)
    expected = golden.golden(name, hvd.size(), extra_meetings=(5,))
    for step in range(1, golden.STEPS + 1):
        train(step)
        if step == 5:
            optimizer.synchronize_replicas()
            optimizer.synchronize_replicas()  # of those that are equal, nothing happens
            assert optimizer.replicas_equal
            assert_equal_on_all_ranks([*model.variables, *optimizer.variables])
            hvd.check_replicas(model, optimizer)
        assert_follows(model, expected, step)


def test_statistics_meet_with_the_last_fragment():
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(2),
            keras.layers.BatchNormalization(momentum=1.0, scale=False, center=False),
        ]
    )
    model, optimizer = distributed(hvd.LocalSGD(4, fragments=2), model)
    mean = model.layers[-1].moving_mean
    mean.assign([hvd.rank()] * 2)
    train = stepper(model, optimizer)
    train(1)
    assert mean.numpy().tolist() == [hvd.rank()] * 2
    train(2)
    assert mean.numpy().tolist() == [(hvd.size() - 1) / 2] * 2


@pytest.mark.parametrize(("name", "background"), [("after a warm-up", False), ("all of it", True)])
def test_a_run_that_is_resumed_comes_to_the_same_bits(name, background, shared_path):
    model, optimizer = distributed(rule_of(name))
    train = stepper(model, optimizer)
    folder = shared_path / f"{name}{background}"
    with hvd.Checkpoint(folder, background=background) as checkpoint:
        for step in range(1, golden.STEPS + 1):
            train(step)
            if step == 5:
                checkpoint.save(step, model=model, optimizer=optimizer)
                assert_equal_on_all_ranks(model.variables)
        again, resumed = distributed(rule_of(name))
        checkpoint.restore(model=again, optimizer=resumed)
        plain = sgd()
        plain.build(again.trainable_variables)
        checkpoint.restore(optimizer=plain)  # which knows nothing of the rule
        train = stepper(again, resumed)
        for step in range(6, golden.STEPS + 1):
            train(step)
    for found, wanted in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_checkpoint_of_a_plain_optimizer_begins_the_rule_anew(shared_path):
    model, optimizer = linear(), sgd()
    optimizer.build(model.trainable_variables)
    with hvd.Checkpoint(shared_path / "plain") as checkpoint:
        checkpoint.save(1, model=model, optimizer=optimizer)
        again, resumed = distributed(hvd.DiLoCo(3))
        stepper(again, resumed)(1)
        checkpoint.restore(model=again, optimizer=resumed)
    train = stepper(again, resumed)
    expected = golden.golden("DiLoCo", hvd.size())
    for step in range(1, 7):
        train(step)
        assert_follows(again, expected, step)


@pytest.mark.usefixtures("several_ranks")
def test_a_guard_compares_what_has_met_and_nothing_else():
    model, optimizer = distributed(hvd.LocalSGD(2))
    train = stepper(model, optimizer)
    guard = hvd.Guard(every=1, on_divergence="repair")
    train(1)
    assert not guard.check(model, optimizer)
    with pytest.raises(HvdsyncError, match="synchronize_replicas"):
        hvd.check_replicas(model, optimizer)
    train(2)
    assert not guard.check(model, optimizer)
    train(3)
    guard.check(model, optimizer)
    train(4)
    bias = model.trainable_variables[1]
    if hvd.rank() == 1:
        bias.assign(bias + 1)
    with pytest.raises(ReplicaMismatch, match="bias"):
        hvd.check_replicas(model, optimizer)
    guard._comparison_is_due = True
    train(5)
    train(6)
    if hvd.rank() == 1:
        bias.assign(bias + 1)
    assert guard.check(model, optimizer)
    assert_equal_on_all_ranks(model.variables)


@pytest.mark.usefixtures("several_ranks")
def test_a_rank_leaves_its_own_bad_step_out():
    guard = hvd.Guard(on_nonfinite="skip")
    model, optimizer = distributed(hvd.LocalSGD(2), guard=guard)
    before = model.get_weights()
    bad = np.full((3, 2), np.nan if hvd.rank() == 1 else 1, "f"), np.ones(2, "f")

    @tf.function
    def step(kernel, bias):
        optimizer.apply([kernel, bias], model.trainable_variables)

    step(*bad)
    kept = all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))
    assert (guard.skipped, kept) == ((1, True) if hvd.rank() == 1 else (0, False))
    step(np.ones((3, 2), "f"), np.ones(2, "f"))
    assert_equal_on_all_ranks(model.variables)
    assert all(np.isfinite(w).all() for w in model.get_weights())


@pytest.mark.usefixtures("several_ranks")
def test_parameters_that_are_not_finite_meet_nobody():
    model, optimizer = distributed(hvd.LocalSGD(2), guard=hvd.Guard(on_nonfinite="skip"))
    train = stepper(model, optimizer)
    train(1)
    if hvd.rank() == 1:
        model.trainable_variables[1].assign([float("inf"), 0.0])
    with pytest.raises(tf.errors.OpError) as error:
        train(2)
    text = str(error.value)
    assert "after step 2: parameters are not finite: rank 1: 1 infinite of 2 elements" in text
    assert all(np.isfinite(w).all() for w in model.get_weights()) == (hvd.rank() != 1)


@pytest.mark.usefixtures("several_ranks")
def test_ranks_that_took_different_numbers_of_steps_are_told():
    model, optimizer = distributed(hvd.LocalSGD(10))
    train = stepper(model, optimizer)
    for step in range(1, 3 + (hvd.rank() == 1)):
        train(step)
    with pytest.raises((RankMismatch, tf.errors.OpError), match=r"rank 0: 2, rank 1: 3"):
        optimizer.synchronize_replicas()


@pytest.mark.usefixtures("several_ranks")
def test_rules_that_differ_between_ranks_are_told():
    with pytest.raises(RankMismatch, match=r"rank 0: LocalSGD\(period=2"):
        distributed(hvd.LocalSGD(2 + hvd.rank()))


def test_combinations_without_sense_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="parameters themselves travel"):
        distributed(hvd.LocalSGD(2), compression=hvd.Compression.fp16)
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="use accumulate="):
        hvd.distribute(linear(), accumulating, update=hvd.LocalSGD(2))


@pytest.mark.usefixtures("several_ranks")
def test_differences_travel_in_halves():
    exact, optimizer = distributed(hvd.DiLoCo(2))
    halves, with_halves = distributed(hvd.DiLoCo(2), compression=hvd.Compression.fp16)
    for train in (stepper(exact, optimizer), stepper(halves, with_halves)):
        train(1)
        train(2)
    assert_equal_on_all_ranks(halves.variables)
    for found, wanted in zip(halves.get_weights(), exact.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-3)
        assert not np.array_equal(found, wanted)
