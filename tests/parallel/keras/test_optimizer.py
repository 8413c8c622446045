"""``compile(optimizer=hvd.distribute(...))`` and ``fit``: exactness on both backends."""

import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from hvdsync.errors import HvdsyncError
from tests.parallel.keras.helpers import (
    assert_close,
    assert_equal_on_all_ranks,
    data,
    fit,
    fit_plain,
    fit_together,
    make_model,
    values,
)
from tests.parallel.keras_nets import FEATURES
from tests.parallel.ranks import shard


@pytest.mark.parametrize("kind", FEATURES)
def test_ranks_together_equal_one_process_on_whole_batches(kind):
    plain = fit_plain(FEATURES[kind]())
    together = fit_together(hvd.distribute(FEATURES[kind]()))
    assert_equal_on_all_ranks(together.variables + together.optimizer.variables)
    assert_close(together.variables, plain.variables)
    assert int(together.optimizer.iterations) == int(plain.optimizer.iterations) > 0


def test_models_that_start_differently_train_as_rank_zeros_would():
    """No callback: distribute() makes weights, slots and rate equal when fit builds it."""
    plain = fit_plain(keras.optimizers.Adam(0.02))
    model = make_model()
    for v in model.variables:
        v.assign(v + float(hvd.rank()))
    together = fit_together(
        hvd.distribute(keras.optimizers.Adam(0.02 * (1 + hvd.rank()))), 3, model
    )
    assert_equal_on_all_ranks(together.variables + together.optimizer.variables)
    assert_close(together.variables, plain.variables)


def test_the_wrapped_optimizer_is_the_given_one():
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    plain.build(make_model().trainable_variables)
    wrapped = hvd.DistributedOptimizer(plain)
    assert isinstance(wrapped, keras.optimizers.SGD)
    assert wrapped.momentums[0] is plain.momentums[0]
    plain.learning_rate = 0.5
    wrapped.learning_rate = float(wrapped.learning_rate) / 2
    assert float(plain.learning_rate) == 0.25
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(wrapped)


@pytest.mark.usefixtures("tensorflow_backend")
@pytest.mark.parametrize("arguments", [{"run_eagerly": True}, {"steps_per_execution": 2}])
def test_eager_steps_and_several_steps_per_call_give_the_same(arguments):
    plain = fit_plain(keras.optimizers.Adam(0.02))
    together = fit_together(hvd.distribute(keras.optimizers.Adam(0.02)), **arguments)
    assert_equal_on_all_ranks(together.variables)
    assert_close(together.variables, plain.variables)


def test_two_models_with_equal_names_train_side_by_side():
    plain = fit_plain(keras.optimizers.Adam(0.02), epochs=2)
    models = [make_model(), make_model()]
    for model in models:
        model.compile(optimizer=hvd.distribute(keras.optimizers.Adam(0.02)), loss="mse")
    for _ in range(2):
        for model in models:
            fit(model, *shard(*data()), 12 // hvd.size(), 1)
    for model in models:
        assert_equal_on_all_ranks(model.variables)
        assert_close(model.variables, plain.variables)


def test_a_train_step_of_ones_own_trains_alike():
    class Doubled(keras.Sequential):
        def train_step(self, batch):
            result = super().train_step(batch)
            return {**result, "twice": 2 * result["loss"]}

    def model():
        layers = [keras.Input((5,)), keras.layers.Dense(1, kernel_initializer="ones")]
        return Doubled(layers)

    plain = fit_plain(keras.optimizers.Adam(0.02), model=model())
    together = fit_together(hvd.distribute(keras.optimizers.Adam(0.02)), model=model())
    assert_equal_on_all_ranks(together.variables)
    assert_close(together.variables, plain.variables)


def test_frozen_layers_stay_and_unfrozen_ones_join():
    model = make_model()
    model.layers[0].trainable = False
    before = values(model.layers[0].variables)
    fit_together(hvd.distribute(keras.optimizers.SGD(0.1)), 1, model)
    assert np.array_equal(before[0], values(model.layers[0].variables)[0])
    model.layers[0].trainable = True
    fit_together(hvd.distribute(keras.optimizers.SGD(0.1)), 1, model)
    assert not np.array_equal(before[0], values(model.layers[0].variables)[0])
    assert_equal_on_all_ranks(model.variables)


@pytest.mark.usefixtures("several_ranks")
def test_infinite_gradients_of_one_rank_skip_the_step_on_all():
    """One verdict, one scale: an overflow on the last rank leaves all weights as they were."""
    x, y = shard(*data())
    model = make_model()
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    model.compile(optimizer=hvd.distribute(scaler), loss="mse")
    before = values(model.variables)
    bad = y.copy()
    if hvd.rank() == hvd.size() - 1:
        bad[0] = np.inf
    model.train_on_batch(x, bad)
    for a, b in zip(before, values(model.variables), strict=True):
        assert a.tobytes() == b.tobytes()
    assert float(model.optimizer.dynamic_scale) == 4.0
    model.train_on_batch(x, y)
    assert int(model.optimizer.iterations) == 1
    assert not np.array_equal(before[0], values(model.variables)[0])
    assert_equal_on_all_ranks(model.variables + model.optimizer.variables)


def test_mixed_precision_trains_with_one_scale_on_all_ranks():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = fit_together(hvd.distribute(keras.optimizers.SGD(0.05)), 2)
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert_equal_on_all_ranks(model.variables + model.optimizer.variables)
    finally:
        keras.mixed_precision.set_global_policy("float32")


@pytest.mark.usefixtures("several_ranks")
def test_a_loss_scale_around_a_distributed_optimizer_is_refused_or_turned_inside_out():
    """compile() may add one for a policy of the model alone."""

    def compiled():
        inner = hvd.distribute(keras.optimizers.SGD(0.05))
        model = make_model()
        model.compile(optimizer=keras.optimizers.LossScaleOptimizer(inner), loss="mse")
        return model

    x, y = shard(*data())
    with pytest.raises(HvdsyncError, match="LossScaleOptimizer"):
        compiled().train_on_batch(x, y)
    model = compiled()
    fit(model, x, y, 6, 1, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    assert int(model.optimizer.iterations) > 0
    assert_equal_on_all_ranks(model.variables + model.optimizer.variables)


def test_local_layers_learn_from_their_own_rank():
    model = make_model()
    local = model.layers[0]
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=local, scale_local_gradients=False
    )
    model.compile(optimizer=optimizer, loss="mse")
    fit(model, *shard(*data()), 6, 1)
    assert_equal_on_all_ranks(model.layers[1].variables)
    kernels = hvd.allgather_object(values(local.variables)[0])
    for other in kernels[1:]:
        assert not np.array_equal(kernels[0], other)


@pytest.mark.parametrize("average", [False, True])
def test_backward_passes_are_summed_before_they_are_reduced(average):
    v = keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=average
    )
    for i in (1.0, 2.0):
        gradient = keras.ops.convert_to_tensor(i * (hvd.rank() + 1))
        optimizer.apply([gradient], [v])
    expected = -3 * (hvd.size() + 1) / 2 / (2 if average else 1)
    assert float(keras.ops.convert_to_numpy(v)) == pytest.approx(expected)


def test_unequal_batches_weigh_by_samples():
    """Rank 0 has 3 samples of x=1, the others one of x=5: the mean over all samples counts."""
    count, x = (3, 1.0) if hvd.rank() == 0 else (1, 5.0)
    v = keras.Variable(0.0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([keras.ops.convert_to_tensor(x * hvd.loss_scale(count))], [v])
    others = hvd.size() - 1
    expected = -(3 + 5 * others) / (3 + others)
    assert float(keras.ops.convert_to_numpy(v)) == pytest.approx(expected, rel=1e-6)


def test_half_precision_and_groups_and_sum():
    total = hvd.size() * (hvd.size() + 1) / 2
    for options, expected in (
        ({"compression": hvd.Compression.fp16}, total / hvd.size()),
        ({"groups": 2}, total / hvd.size()),
        ({"groups": "first and last"}, total / hvd.size()),
        ({"op": hvd.Sum}, total),
        ({"gradient_predivide_factor": 2.0}, total / hvd.size()),
    ):
        vs = [keras.Variable(0.0) for _ in range(3)]
        if options.get("groups") == "first and last":
            options = {"groups": [[vs[0], vs[2]]]}
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        gradient = keras.ops.convert_to_tensor(hvd.rank() + 1.0)
        optimizer.apply([gradient] * 3, vs)
        assert [float(keras.ops.convert_to_numpy(v)) for v in vs] == [-expected] * 3


def test_values_are_reduced_gathered_and_broadcast():
    ranks, total = hvd.size(), hvd.size() * (hvd.size() + 1) / 2

    def array(tensor):
        return keras.ops.convert_to_numpy(tensor)

    assert float(array(hvd.allreduce(hvd.rank() + 1.0))) == total / ranks
    assert float(array(hvd.allreduce(hvd.rank() + 1.0, average=False))) == total
    assert float(array(hvd.allreduce(keras.Variable(hvd.rank() + 1.0), op=hvd.Sum))) == total
    gathered = array(hvd.allgather(np.full(hvd.rank() + 1, hvd.rank())))
    assert gathered.tolist() == [r for r in range(ranks) for _ in range(r + 1)]
    assert int(array(hvd.broadcast(hvd.rank(), ranks - 1))) == ranks - 1
    part = array(hvd.reducescatter(np.arange(2.0 * ranks), op=hvd.Sum))
    assert part.tolist() == [ranks * x for x in (2.0 * hvd.rank(), 2.0 * hvd.rank() + 1)]
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)


@pytest.mark.usefixtures("several_ranks")
def test_a_step_that_reduces_nothing_is_an_error():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(HvdsyncError, match="DistributedSGD.*reduces nothing"):
        optimizer.apply([], [])
