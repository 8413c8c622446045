"""A NaN on one rank is one verdict on all, before the update, on both backends of Keras."""

import logging

import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from hvdsync.errors import NonFiniteGradient
from tests.parallel.keras.helpers import (
    assert_equal_on_all_ranks,
    data,
    fit,
    make_model,
    values,
)

NAN, INF = float("nan"), float("inf")
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
}


def last():
    return hvd.size() - 1


def compiled(guard=None, optimizer="sgd", model=None, **options):
    model = model or make_model()
    optimizer = hvd.distribute(OPTIMIZERS[optimizer](), guard=guard, **options)
    model.compile(optimizer, keras.losses.MeanSquaredError(), jit_compile=False)
    return model


def apply(model, bad=None, rank=None):
    """One step by hand; ``bad`` is (position of the variable, values) on one rank."""
    gradients = [np.ones(v.shape, v.dtype) for v in model.trainable_variables]
    if bad is not None and hvd.rank() == (last() if rank is None else rank):
        gradients[bad[0]].reshape(-1)[: len(bad[1])] = bad[1]
    gradients = [keras.ops.convert_to_tensor(g) for g in gradients]
    model.optimizer.apply(gradients, model.trainable_variables)


def state(model):
    return values([*model.variables, *model.optimizer.variables])


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def said_alike(text):
    assert text.startswith(f"rank {hvd.rank()} of {hvd.size()}: ")
    assert len(set(hvd.allgather_object(text.partition(": ")[2]))) == 1
    return text


def poisoned(batch, value=NAN):
    """Data of which one batch of 4 has a bad sample, on the last rank."""
    x, y = data()
    x = x.copy()
    if hvd.rank() == last():
        x[4 * batch, 1] = value
    return x, y


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_raise_names_rank_step_tensor_and_counts(optimizer):
    model = compiled(hvd.Guard(), optimizer)
    apply(model)
    before = state(model)
    with pytest.raises(NonFiniteGradient) as error:
        apply(model, (0, [NAN, INF, INF]))
    text = said_alike(str(error.value))
    name = model.trainable_variables[0].path
    assert "step 2:" in text
    assert f"rank {last()}: 1 NaN and 2 infinite of 35 elements in {name!r}" in text
    assert "its input was not seen" in text and text.count("elements in") == 1
    assert_same(state(model), before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_skip_leaves_weights_and_optimizer_state_alone(optimizer, caplog):
    guard = hvd.Guard(on_nonfinite="skip")
    model = compiled(guard, optimizer)
    apply(model)
    before = state(model)
    with caplog.at_level(logging.WARNING, logger="hvdsync.guard"):
        apply(model, (2, [NAN]))
    assert guard.skipped == 1
    assert_same(state(model), before)
    assert (hvd.rank() == 0) == any("left out" in r.getMessage() for r in caplog.records)
    apply(model)
    assert guard.skipped == 1
    assert not np.array_equal(state(model)[0], before[0])
    assert_equal_on_all_ranks([*model.variables, *model.optimizer.variables])


def test_a_callback_ends_the_fit_and_knows_that_the_input_was_bad():
    model = compiled()
    fit(model, *data(), 4, 1)
    before = values(model.trainable_variables)
    with pytest.raises(NonFiniteGradient) as error:
        fit(model, *poisoned(0), 4, 1, callbacks=[hvd.callbacks.GuardCallback()])
    text = said_alike(str(error.value))
    assert "step 13:" in text and f"rank {last()}: " in text
    assert "its input was bad already (1 NaN elements)" in text
    assert_same(values(model.trainable_variables), before)


def test_a_callback_skips_and_counts_and_the_fit_goes_on():
    callback = hvd.callbacks.GuardCallback(on_nonfinite="skip")
    model = compiled(optimizer="adam")
    fit(model, *poisoned(3, INF), 4, 2, callbacks=[callback])
    assert callback.guard.skipped == 2
    assert int(model.optimizer.iterations) == 2 * 12 - 2
    assert all(np.isfinite(v).all() for v in state(model))
    assert_equal_on_all_ranks([*model.variables, *model.optimizer.variables])
    other = hvd.callbacks.GuardCallback(on_nonfinite="skip")
    fit(model, *poisoned(3), 4, 1, callbacks=[other])
    assert (callback.guard.skipped, other.guard.skipped) == (2, 1)


def test_a_guard_of_the_optimizer_goes_before_that_of_the_callback():
    guard = hvd.Guard(on_nonfinite="skip")
    callback = hvd.callbacks.GuardCallback()
    model = compiled(guard)
    fit(model, *poisoned(2), 4, 1, callbacks=[callback])
    assert guard.skipped == 1 and callback.guard.skipped == 0
    guard.on_nonfinite = "raise"
    with pytest.raises(NonFiniteGradient, match="bad already"):
        fit(model, *poisoned(2), 4, 1, callbacks=[callback])


def test_a_fit_with_a_guarded_optimizer_needs_no_callback():
    guard = hvd.Guard()
    model = compiled(guard)
    with pytest.raises(Exception, match="gradients are not finite"):
        fit(model, *poisoned(1), 4, 1)
    assert "its input was bad already" in said_alike(str(guard.failure))
    assert int(model.optimizer.iterations) == 1


def test_several_batches_in_one_execution(tensorflow_backend):
    model = make_model()
    optimizer = hvd.distribute(OPTIMIZERS["sgd"]())
    model.compile(optimizer, "mse", steps_per_execution=3, jit_compile=False)
    with pytest.raises(NonFiniteGradient, match="step 2:"):
        fit(model, *poisoned(1), 4, 1, callbacks=[hvd.callbacks.GuardCallback()])
    assert all(np.isfinite(v).all() for v in state(model))


def test_a_fit_that_runs_eagerly():
    model = make_model()
    model.compile(hvd.distribute(OPTIMIZERS["sgd"]()), "mse", run_eagerly=True)
    with pytest.raises(NonFiniteGradient, match="its input was bad already"):
        fit(model, *poisoned(1), 4, 1, callbacks=[hvd.callbacks.GuardCallback()])
    assert int(model.optimizer.iterations) == 1


def test_finite_gradients_whose_sum_overflows_are_no_ranks_fault():
    if hvd.size() < 2:
        pytest.skip("one rank sums nothing")
    model = compiled(hvd.Guard())
    apply(model)
    before = state(model)
    with pytest.raises(NonFiniteGradient, match="it overflows in 2 of 7 elements"):
        apply(model, (2, [3e38, 1.0, 3e38]), rank=hvd.rank())
    assert_same(state(model), before)


def test_large_gradients_that_are_finite_are_let_through():
    guard = hvd.Guard()
    model = compiled(guard)
    apply(model, (2, [1e30]))
    assert np.isfinite(state(model)[2]).all() and guard.failure is None


def test_a_variable_of_each_rank_alone_is_judged_for_all():
    guard = hvd.Guard(on_nonfinite="skip")
    model = compiled(guard)
    model.optimizer.register_local_var(model.trainable_variables[1])
    apply(model)
    before = state(model)
    apply(model, (1, [NAN]), rank=0)
    assert guard.skipped == 1
    assert_same(state(model), before)


def test_a_bad_pass_among_several_leaves_out_their_step():
    guard = hvd.Guard(on_nonfinite="skip")
    model = compiled(guard, accumulate=2)
    for bad in (None, None):
        apply(model, bad)
    before = state(model)
    for bad in ((0, [NAN]), None):
        apply(model, bad)
    assert guard.skipped == 1
    assert_same(state(model), before)
    for bad in (None, None):
        apply(model, bad)
    assert guard.skipped == 1
    assert np.isfinite(state(model)[0]).all()
    assert not np.array_equal(state(model)[0], before[0])


def test_a_loss_scaler_leaves_out_its_steps_before_any_verdict():
    model = make_model()
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)
    guard = hvd.Guard()
    model.compile(hvd.distribute(scaler, guard=guard), "mse", jit_compile=False)
    apply(model)
    before = values(model.trainable_variables)
    apply(model, (0, [INF]))
    assert float(model.optimizer.dynamic_scale) == 512.0
    assert_same(values(model.trainable_variables), before)
    apply(model)
    assert guard.failure is None and guard.skipped == 0
    assert not np.array_equal(values(model.trainable_variables)[0], before[0])


def test_without_trouble_a_guard_changes_no_bit():
    guarded, plain = compiled(hvd.Guard(), "adam"), compiled(None, "adam")
    for model in (guarded, plain):
        fit(model, *data(), 4, 2)
    assert_same(state(guarded), state(plain))


@pytest.mark.slow
def test_a_step_that_is_compiled_is_judged():
    if keras.backend.backend() != "torch":
        pytest.skip("TensorFlow's steps are not compiled by XLA")
    guard = hvd.Guard(on_nonfinite="skip")
    model = make_model()
    model.compile(hvd.distribute(OPTIMIZERS["sgd"](), guard=guard), "mse", jit_compile=True)
    fit(model, *poisoned(1), 4, 1)
    assert guard.skipped == 1
    assert all(np.isfinite(v).all() for v in state(model))
