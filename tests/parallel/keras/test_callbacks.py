"""Callbacks: what every rank sees, when it stops, and the learning rate that it takes."""

import logging
import threading

import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from hvdsync.comm import recurring
from hvdsync.errors import HvdsyncError, RankMismatch
from tests.parallel.cases import matrix_but
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
from tests.parallel.ranks import shard


class Watch(keras.callbacks.Callback):
    """What a callback of the user's sees."""

    def __init__(self):
        super().__init__()
        self.epochs, self.rates, self.weights = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))
        self.weights.append(values(self.model.variables)[0])

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(dict(logs))


def test_the_first_batch_starts_from_the_roots_model_and_optimizer():
    root = hvd.size() - 1
    model = make_model(norm=True)
    for v in model.variables:
        v.assign(v * 0 + float(hvd.rank() + 1))
    optimizer = keras.optimizers.Adam(0.01 * (hvd.rank() + 1))
    watch = Watch()
    callbacks = [watch, hvd.callbacks.BroadcastGlobalVariablesCallback(root)]
    fit_together(hvd.DistributedOptimizer(optimizer), 1, model, callbacks)
    assert np.unique(watch.weights[0]).tolist() == [root + 1]
    assert watch.rates[0] == pytest.approx(0.01 * (root + 1))
    assert_equal_on_all_ranks(model.trainable_variables + model.optimizer.variables)


def test_local_variables_are_not_broadcast():
    model = make_model()
    for v in model.variables:
        v.assign(v * 0 + float(hvd.rank()))
    kernel = model.layers[0].kernel
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[kernel])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    fit_together(optimizer, 1, model, [callback])
    assert np.unique(values([kernel])[0]).tolist() == [hvd.rank()]
    assert np.unique(values([model.layers[1].kernel])[0]).tolist() == [0]


@pytest.mark.usefixtures("several_ranks")
def test_different_models_are_refused_before_the_first_batch():
    model = make_model(features=5 + (hvd.rank() == 1))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(RankMismatch, match=r"rank 0: .*\(5, 7\).*rank 1: .*\(6, 7\)"):
        fit(
            model,
            *data(features=5 + (hvd.rank() == 1)),
            12,
            callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
        )


@pytest.mark.parametrize("position", matrix_but(["last"], ["first", "last"]))
def test_every_callback_sees_metrics_over_all_samples_in_any_order(position):
    """Unequal validation shards; an AUC, which no average of AUCs gives."""
    x, y = data(60)
    y = (y > 0).astype("float32")
    bounds = (
        [0, 9 + 40 // hvd.size(), 60] if hvd.size() == 2 else np.linspace(0, 60, hvd.size() + 1)
    )
    start, stop = (int(b) for b in bounds[hvd.rank() : hvd.rank() + 2])

    def compiled(optimizer):
        model = make_model()
        model.layers[-1].activation = keras.activations.sigmoid
        model.compile(
            optimizer, "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")]
        )
        return model

    watch = Watch()
    average = hvd.callbacks.MetricAverageCallback()
    callbacks = [average, watch] if position == "first" else [watch, average]
    model = compiled(hvd.distribute(keras.optimizers.SGD(0.5)))
    history = fit(
        model,
        *shard(x, y),
        6,
        2,
        callbacks=callbacks,
        validation_data=(x[start:stop], y[start:stop]),
    )
    everyone = hvd.allgather_object(watch.epochs)
    assert all(seen == everyone[0] for seen in everyone)
    reference = compiled(keras.optimizers.SGD(0.5))
    reference.set_weights(model.get_weights())
    expected = reference.evaluate(x, y, verbose=0, return_dict=True)
    for name, value in expected.items():
        assert watch.epochs[-1][f"val_{name}"] == pytest.approx(value, rel=1e-4), name
        assert history.history[f"val_{name}"][-1] == watch.epochs[-1][f"val_{name}"]
    assert set(watch.epochs[0]) == {p + n for n in expected for p in ("", "val_")}


def test_accuracies_of_unequal_shards_are_weighted_by_their_sizes():
    """.9 of 100 samples and .1 of 10: .827, not .5."""
    count, right = (100, 90) if hvd.rank() == 0 else (10, 1)
    x = np.zeros((count, 1), "float32")
    y = np.array([0.0] * right + [1.0] * (count - right), "float32")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", metrics=[keras.metrics.BinaryAccuracy(name="acc")])
    watch = Watch()
    callbacks = [watch, hvd.callbacks.MetricAverageCallback()]
    fit(model, x[:4], y[:4], 4, 1, callbacks=callbacks, validation_data=(x, y))
    others = hvd.size() - 1
    expected = (90 + others) / (100 + 10 * others)
    assert watch.epochs[0]["val_acc"] == pytest.approx(expected, rel=1e-6)


def test_plain_logs_of_a_train_step_are_averaged_by_samples():
    class Logs(keras.Sequential):
        def train_step(self, batch):
            super().train_step(batch)
            return {"mine": float(hvd.rank() + 1)}

    model = Logs([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", run_eagerly=True)
    watch = Watch()
    x, y = data(12)
    own = 8 if hvd.rank() == 0 else 4
    fit(model, x[:own], y[:own], own, 1, callbacks=[watch, hvd.callbacks.MetricAverageCallback()])
    sizes = [8] + [4] * (hvd.size() - 1)
    expected = sum(s * (r + 1) for r, s in enumerate(sizes)) / sum(sizes)
    assert watch.epochs[0]["mine"] == pytest.approx(expected)


def test_early_stopping_given_to_one_rank_stops_all_in_the_same_epoch():
    early = keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0)
    callbacks = [hvd.callbacks.MetricAverageCallback()] + ([early] if hvd.rank() == 0 else [])
    model = make_model()
    model.compile(hvd.distribute(keras.optimizers.SGD(0.01)), "mse")
    history = fit(model, *shard(*data()), 6, 9, callbacks=callbacks)
    assert hvd.allgather_object(len(history.epoch)) == [2] * hvd.size()


@pytest.mark.parametrize("seconds", matrix_but([0.25], [0.0, 0.25, 1e9]))
def test_a_callback_that_stops_one_rank_within_an_epoch_stops_all_after_one_batch(
    seconds, monkeypatch
):
    """Asked at each batch, as usual, and never again before the epoch is over."""
    monkeypatch.setattr(recurring, "_SECONDS", seconds)
    done = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            done.append(batch)
            if hvd.rank() == hvd.size() - 1 and batch == 2:
                self.model.stop_training = True

    model = make_model()
    model.compile(hvd.distribute(keras.optimizers.SGD(0.01)), "mse")
    x, y = data(10 * hvd.size())
    callbacks = [Stop(), hvd.callbacks.MetricAverageCallback()]
    history = fit(model, *shard(x, y), 1, 9, callbacks=callbacks)
    assert len(history.epoch) == 1
    counts = hvd.allgather_object(len(done))
    assert counts == [counts[0]] * hvd.size()
    assert counts[0] >= 3
    if seconds == 0.0 or hvd.size() == 1:
        assert counts[0] == 3


def test_a_nan_on_one_rank_ends_training_on_all():
    x, y = shard(*data())
    if hvd.rank() == hvd.size() - 1:
        y = y * np.nan
    model = make_model()
    model.compile(hvd.distribute(keras.optimizers.SGD(0.01)), "mse")
    callbacks = [hvd.callbacks.MetricAverageCallback(), keras.callbacks.TerminateOnNaN()]
    history = fit(model, x, y, 4, 3, callbacks=callbacks)
    assert len(history.epoch) == 1


def test_a_plateau_lowers_the_rate_on_all_ranks_alike():
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0)
    model = make_model()
    for v in model.variables:
        v.assign(v + hvd.rank())
    callbacks = [plateau, hvd.callbacks.MetricAverageCallback()]
    fit_together(hvd.distribute(keras.optimizers.SGD(0.01)), 4, model, callbacks)
    assert_equal_on_all_ranks(model.optimizer.variables)
    assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) < 0.01


def test_warm_up_and_staircase_follow_the_formula_and_resume_on_it():
    """The same curve in one run of 4 epochs and in two runs of 2, with a fresh callback each."""
    ranks, steps = hvd.size(), 4

    def rates(first, last):
        watch = Watch()
        callbacks = [
            hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1),
            hvd.callbacks.LearningRateScheduleCallback(0.4, 0.1, start_epoch=2),
            watch,
        ]
        model = make_model()
        model.compile(hvd.distribute(keras.optimizers.SGD(0.4, momentum=0.5)), "mse")
        fit(model, *shard(*data()), 12 // ranks, last, initial_epoch=first, callbacks=callbacks)
        return watch.rates

    warming = [(i + 1) / steps for i in range(2 * steps)]
    expected = [0.4 / ranks * (epoch * (ranks - 1) / 2 + 1) for epoch in warming]
    expected += [0.4] * steps + [0.04] * steps
    assert rates(0, 4) == pytest.approx(expected, rel=1e-5)
    assert rates(0, 3)[: 2 * steps] + rates(2, 4) == pytest.approx(expected, rel=1e-5)


def test_a_schedule_counted_in_steps_does_not_care_about_epochs():
    watch = Watch()
    factor = hvd.warmup(6, start=0.25, after=lambda step: 0.5**step)
    callbacks = [hvd.callbacks.ScheduleCallback(0.8, factor), watch]
    fit_together(hvd.distribute(keras.optimizers.SGD(0.8)), 2, callbacks=callbacks)
    expected = [0.8 * (0.25 + 0.75 * s / 6) for s in range(6)] + [0.8, 0.4]
    assert watch.rates == pytest.approx(expected, rel=1e-5)


def test_momentum_is_corrected_when_the_rate_changes():
    model = make_model()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    optimizer.momentums[0].assign(optimizer.momentums[0] + 1.0)
    hvd.callbacks.set_rate(optimizer, 0.2, correct_momentum=True)
    assert np.unique(values(optimizer.momentums[:1])[0]).tolist() == [2.0]
    assert float(keras.ops.convert_to_numpy(optimizer.learning_rate)) == pytest.approx(0.2)


def test_a_callback_refuses_a_schedule_object():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
    with pytest.raises(ValueError, match="schedule of its own"):
        fit_together(hvd.distribute(keras.optimizers.SGD(schedule)), callbacks=[callback])


@pytest.mark.usefixtures("several_ranks")
def test_a_plain_optimizer_is_refused_at_the_start_of_fit():
    with pytest.raises(HvdsyncError, match=r"plain SGD.*load_model"):
        fit_together(keras.optimizers.SGD(0.1), callbacks=[hvd.callbacks.MetricAverageCallback()])


@pytest.mark.usefixtures("several_ranks")
def test_jit_compile_trains_and_equals_one_process(caplog):
    """TensorFlow: XLA is switched off for the step, with one line. PyTorch: the graph breaks."""
    plain = fit_plain(keras.optimizers.Adam(0.02))
    with caplog.at_level(logging.WARNING):
        together = fit_together(
            hvd.distribute(keras.optimizers.Adam(0.02)),
            callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)],
            jit_compile=True,
        )
    assert_equal_on_all_ranks(together.variables)
    assert_close(together.variables, plain.variables)
    lines = [r for r in caplog.records if "jit_compile is switched off" in r.getMessage()]
    assert len(lines) == (hvd.rank() == 0 and keras.backend.backend() == "tensorflow")


@pytest.mark.usefixtures("several_ranks", "tensorflow_backend")
def test_jit_compile_without_a_callback_says_what_to_do():
    with pytest.raises(HvdsyncError, match="jit_compile=False"):
        fit_together(hvd.distribute(keras.optimizers.SGD(0.02)), jit_compile=True)


def test_elastic_state_commits_restores_and_synchronises():
    model = make_model()
    for v in model.variables:
        v.assign(v * 0 + float(hvd.rank() + 1))
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    state = hvd.elastic.KerasState(model, batch=hvd.rank(), epoch=0)
    state.sync()
    assert np.unique(values(model.variables)[0]).tolist() == [1.0] and state.batch == 0
    committed = values(model.variables + model.optimizer.variables)
    state.epoch = 5
    x, y = shard(*data())
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]
    fit(model, x, y, 6, 2, callbacks=callbacks)
    assert (state.batch, state.epoch) == (0, 7)
    assert not np.array_equal(committed[0], values(model.variables)[0])
    state.restore()
    for a, b in zip(committed, values(model.variables + model.optimizer.variables), strict=True):
        assert a.tobytes() == b.tobytes()
    assert state.epoch == 0
    fit(model, x, y, 6, 1, callbacks=[hvd.elastic.CommitStateCallback(state, 2)])
    trained = values(model.variables)
    for v in model.variables:
        v.assign(v * 0)
    state.restore()
    assert values(model.variables)[0].tobytes() == trained[0].tobytes()


def test_ranks_agree_on_the_end_in_the_thread_that_trains(monkeypatch):
    threads = set()
    ask = recurring.RecurringVerdict.ask

    def watched(self, wish):
        threads.add(threading.current_thread())
        return ask(self, wish)

    monkeypatch.setattr(recurring.RecurringVerdict, "ask", watched)
    # Of the callbacks given none has anything to do at the end of a batch.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    fit_together(optimizer, callbacks=[hvd.callbacks.MetricAverageCallback()])
    assert threads == ({threading.current_thread()} if hvd.size() > 1 else set())
