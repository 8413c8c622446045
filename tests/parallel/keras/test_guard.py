"""Replicas that differ in one bit are found, named and mended, on both backends of Keras."""

import logging

import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from hvdsync.errors import HvdsyncError, ReplicaMismatch
from tests.parallel.keras.helpers import (
    assert_equal_on_all_ranks,
    fit_together,
    make_model,
)

pytestmark = pytest.mark.usefixtures("several_ranks")

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
}


def net():
    """With statistics of all ranks' batches, so that nothing in it is a rank's own."""
    layers = make_model().layers
    layers.insert(1, hvd.SyncBatchNormalization())
    return keras.Sequential([keras.Input((5,)), *layers])


def stepped(optimizer="adam"):
    """Equal replicas after a step with equal gradients."""
    model = net()
    model.compile(hvd.distribute(OPTIMIZERS[optimizer]()), "mse")
    gradients = [keras.ops.ones(v.shape) for v in model.trainable_variables]
    model.optimizer.apply(gradients, model.trainable_variables)
    return model


def fitted(callbacks):
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    optimizer = hvd.distribute(keras.optimizers.Adam(0.01))
    return fit_together(optimizer, 1, net(), callbacks=[start, *callbacks])


def flip(variable):
    """The lowest mantissa bit of the last element, on the last rank only."""
    if hvd.rank() == hvd.size() - 1:
        value = np.array(keras.ops.convert_to_numpy(variable), order="C")
        value.reshape(-1).view({4: np.uint32, 8: np.uint64}[value.itemsize])[-1:] ^= 1
        variable.assign(value)


def mismatch_of(*arguments, **options):
    """What is said, once all ranks have said it."""
    with pytest.raises(ReplicaMismatch) as error:
        hvd.check_replicas(*arguments, **options)
    text = str(error.value)
    assert len(set(hvd.allgather_object(text.partition(": ")[2]))) == 1
    return text


class Damage(keras.callbacks.Callback):
    """Flips a bit of the first kernel before batch 1 on the last rank."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1:
            flip(self.model.trainable_variables[0])


def test_equal_replicas_pass():
    model = stepped()
    hvd.check_replicas(model)
    hvd.check_replicas(model, model.optimizer)
    hvd.check_replicas(model.variables)


def test_one_flipped_bit_of_a_kernel_is_found_and_measured():
    model = stepped()
    kernel = model.layers[0].kernel
    flip(kernel)
    text = mismatch_of(model)
    last = hvd.size() - 1
    assert f"{kernel.path!r} (float32 (5, 7))" in text
    assert f"rank {last} differs from" in text
    assert f"rank {last} in 1 of 35 elements, by at most" in text


def test_one_flipped_bit_of_a_moving_average_is_found():
    model = stepped()
    flip(model.layers[1].moving_variance)
    assert repr(model.layers[1].moving_variance.path) in mismatch_of(model)
    hvd.check_replicas(model, ignore=["*/moving_*"])


@pytest.mark.parametrize(
    ("optimizer", "slot"), [("sgd", "momentum"), ("adam", "momentum"), ("adam", "velocity")]
)
def test_one_flipped_bit_of_a_slot_is_found(optimizer, slot):
    model = stepped(optimizer)
    variable = [v for v in model.optimizer.variables if v.path.endswith(slot)][-1]
    flip(variable)
    assert repr(variable.path) in mismatch_of(model)


def test_a_learning_rate_of_one_rank_is_found():
    model = stepped()
    model.optimizer.learning_rate = 0.02 if hvd.rank() == 0 else 0.01
    text = mismatch_of(model)
    assert "learning_rate'" in text and "rank 0 0.0199" in text


def test_the_rate_of_a_schedule_is_compared():
    model = make_model()
    rate = keras.optimizers.schedules.ExponentialDecay(0.1 + 0.1 * (hvd.rank() == 0), 10, 0.5)
    model.compile(hvd.distribute(keras.optimizers.SGD(rate)), "mse")
    assert "'optimizer.learning_rate'" in mismatch_of(model)


def test_a_step_count_of_one_rank_is_found():
    model = stepped()
    model.optimizer.iterations.assign(model.optimizer.iterations + int(hvd.rank() == 0))
    assert "iteration'" in mismatch_of(model)


def test_the_scale_of_a_loss_scale_optimizer_is_compared():
    model = make_model()
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=2.0 ** (10 + (hvd.rank() == 0))
    )
    model.compile(hvd.distribute(optimizer), "mse")
    model.optimizer.build(model.trainable_variables)
    text = mismatch_of(model)
    assert "dynamic_scale" in text and "2048.0" in text and "1024.0" in text


def test_seed_generators_are_each_ranks_own():
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.5, seed=hvd.rank())])
    hvd.check_replicas(model)


def test_layers_that_one_rank_counts_differently_are_no_difference():
    if hvd.rank() == 0:
        make_model()
    hvd.check_replicas(make_model())


def test_variables_that_stay_each_ranks_own_are_not_compared_with_their_slots():
    model = make_model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    own = model.layers[0].kernel
    optimizer.register_local_var(own)
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    slot = next(v for v in optimizer.variables if v.name.startswith(own.path.replace("/", "_")))
    flip(own)
    flip(slot)
    hvd.check_replicas(model)


def test_the_callback_ends_the_fit_on_every_rank():
    guard = hvd.callbacks.GuardCallback(every=2)
    with pytest.raises(ReplicaMismatch, match="kernel"):
        fitted([Damage(), guard])


def test_the_callback_mends_replicas_and_says_so_on_rank_zero(caplog):
    guard = hvd.callbacks.GuardCallback(every=2, on_divergence="repair")
    with caplog.at_level(logging.WARNING, logger="hvdsync.guard"):
        model = fitted([Damage(), guard])
    assert guard.guard.repairs == 1
    said = [r.getMessage() for r in caplog.records if r.name.startswith("hvdsync.guard")]
    if hvd.rank() == 0:
        assert len(said) == 1
        assert "step 2" in said[0] and "kernel" in said[0] and "state of rank 0" in said[0]
    else:
        assert said == []
    assert_equal_on_all_ranks([*model.weights, *model.optimizer.variables])


def test_repair_by_hand_gives_the_bits_of_rank_zero():
    model = stepped("sgd")
    expected = hvd.broadcast_object(model.get_weights())
    for variable in [*model.weights, *model.optimizer.variables]:
        flip(variable)
    assert hvd.Guard(every=1, on_divergence="repair").check(model)
    for found, value in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(found, value)
    assert_equal_on_all_ranks([*model.weights, *model.optimizer.variables])


def test_what_has_no_variables_fails_on_every_rank():
    model = object() if hvd.rank() == 0 else make_model()
    with pytest.raises(AttributeError if hvd.rank() == 0 else HvdsyncError, match="variables"):
        hvd.check_replicas(model)


def test_a_fit_of_equal_replicas_is_left_alone():
    guard = hvd.callbacks.GuardCallback(every=1)
    fitted([guard])
    assert guard.guard.repairs == 0
