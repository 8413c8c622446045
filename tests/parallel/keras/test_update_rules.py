"""Ranks that take steps alone inside ``fit`` and meet follow the rule to the number."""

import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from hvdsync.errors import HvdsyncError, NonFiniteGradient
from tests.parallel import golden_updates as golden
from tests.parallel.cases import matrix_but
from tests.parallel.keras.helpers import assert_equal_on_all_ranks

# The mathematics are those of PyTorch, which make test runs.
pytestmark = pytest.mark.slow


def linear(rule, norm=False, **options):
    layers = [keras.Input((3,)), keras.layers.Dense(2)]
    if norm:
        layers.append(keras.layers.BatchNormalization(momentum=1.0, scale=False, center=False))
    model = keras.Sequential(layers)
    model.layers[0].set_weights(golden.initial())
    optimizer = keras.optimizers.SGD(golden.RATE, golden.MOMENTUM)
    model.compile(
        hvd.distribute(optimizer, update=rule, **options),
        keras.losses.MeanSquaredError(),
        jit_compile=False,
    )
    return model


def rule_of(name):
    kind, options = golden.RULES[name]
    return getattr(hvd, kind)(**options)


class Follow(keras.callbacks.Callback):
    """Compares the weights after each batch; ``first`` is the number of the first one."""

    def __init__(self, expected=None, first=1):
        super().__init__()
        self.expected, self.step, self.equal = expected, first - 1, []

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        self.equal.append(self.model.optimizer.replicas_equal)
        if self.expected is None:
            return
        wanted = self.expected[self.step][hvd.rank()]
        for variable, values in zip(self.model.trainable_variables, wanted, strict=True):
            found = keras.ops.convert_to_numpy(variable)
            message = f"step {self.step}"
            np.testing.assert_allclose(found, values, rtol=2e-5, atol=1e-6, err_msg=message)


def fit(model, steps, *callbacks, first=1, **arguments):
    batches = [golden.batch(hvd.rank(), step) for step in range(first, steps + 1)]
    x, y = map(np.concatenate, zip(*batches, strict=True))
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=list(callbacks), **arguments)


@pytest.mark.parametrize("name", matrix_but(["after a warm-up", "all of it"], golden.RULES))
def test_every_batch_of_each_rank_is_that_of_the_rule(name):
    model = linear(rule_of(name))
    follow = Follow(golden.golden(name, hvd.size()))
    fit(model, golden.STEPS, follow)
    assert follow.step == golden.STEPS


def test_replicas_are_said_to_be_equal_when_they_are():
    follow = Follow()
    fit(linear(hvd.LocalSGD(3, warmup_steps=1)), 7, follow)
    between = hvd.size() == 1
    assert follow.equal == [True, between, between, True, between, between, True]


@pytest.mark.parametrize("name", ["after a warm-up", "all of it"])
def test_a_run_that_is_resumed_comes_to_the_same_bits(name, shared_path):
    model = linear(rule_of(name))
    with hvd.Checkpoint(shared_path / name) as checkpoint:
        fit(model, 5)
        checkpoint.save(5, model=model)
        assert_equal_on_all_ranks([*model.variables, *model.optimizer.variables])
        fit(model, golden.STEPS, first=6)
        again = linear(rule_of(name))
        checkpoint.restore(model=again)
    expected = golden.golden(name, hvd.size(), extra_meetings=(5,))
    fit(again, golden.STEPS, Follow(expected, 6), first=6)
    for found, wanted in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(found, wanted)
    loaded = keras.models.load_model(next(checkpoint.directory.glob("*/model.keras")))
    assert len(loaded.optimizer.variables) == len(model.optimizer.variables)


def test_statistics_meet_where_the_broadcast_callback_names_them():
    model = linear(hvd.LocalSGD(2), norm=True)
    mean = model.layers[-1].moving_mean

    class Differ(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 0:
                mean.assign(np.full(2, hvd.rank(), "f"))

    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    fit(model, 2, broadcast, Differ())
    found = keras.ops.convert_to_numpy(mean).tolist()
    assert found == [(hvd.size() - 1) / 2] * 2


@pytest.mark.usefixtures("several_ranks")
def test_a_loss_scale_leaves_out_a_step_of_one_rank_and_replicas_meet():
    model = linear(hvd.LocalSGD(2))
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=4.0)
    optimizer = hvd.distribute(scaler, update=hvd.LocalSGD(2))
    before = model.get_weights()
    # An infinite one halves the scale.
    for scaled in (np.inf, 2.0) if hvd.rank() == 1 else (4.0, 4.0):
        gradients = [np.full(w.shape, scaled, "f") for w in before]
        optimizer.apply(
            [keras.ops.convert_to_tensor(g) for g in gradients], model.trainable_variables
        )
    # Rank 1 has taken one step of 0.1, the others two.
    taken = (2 * hvd.size() - 1) / hvd.size()
    for found, weight in zip(model.get_weights(), before, strict=True):
        np.testing.assert_allclose(found, weight - 0.1 * taken, rtol=1e-5)


@pytest.mark.usefixtures("several_ranks")
def test_a_guard_callback_compares_at_meetings_only():
    model = linear(hvd.LocalSGD(2))
    guard = hvd.callbacks.GuardCallback(every=1)
    fit(model, 6, guard)
    fit(model, 7, guard, first=7)
    with pytest.raises(HvdsyncError, match="synchronize_replicas"):
        hvd.check_replicas(model)
    model.optimizer.synchronize_replicas()
    hvd.check_replicas(model)


@pytest.mark.usefixtures("several_ranks")
def test_parameters_that_are_not_finite_meet_nobody():
    model = linear(hvd.LocalSGD(2))

    class Damage(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0 and hvd.rank() == 1:
                model.trainable_variables[1].assign([float("inf"), 0.0])

    guard = hvd.callbacks.GuardCallback(on_nonfinite="skip")
    with pytest.raises(NonFiniteGradient, match="after step 2: parameters are not finite: rank 1"):
        fit(model, 3, Damage(), guard)
    assert all(np.isfinite(w).all() for w in model.get_weights()) == (hvd.rank() != 1)
