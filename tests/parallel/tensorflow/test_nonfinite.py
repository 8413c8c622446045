"""A NaN on one rank is one verdict on all, before the update, in TensorFlow (1, 2 and 4 ranks)."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd
from hvdsync.errors import HvdsyncError, NonFiniteGradient
from tests.parallel.cases import matrix_but
from tests.parallel.tensorflow.helpers import assert_equal_on_all_ranks, make_model, values

NAN, INF = float("nan"), float("inf")
BOTH = pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


def last():
    return hvd.size() - 1


class Run:
    """A training step whose gradients can be damaged on one rank, before they are reduced."""

    def __init__(self, guard, optimizer="sgd", in_graph=True, shown=False, model=None, **options):
        self.guard = guard
        self.shown = shown
        self.model, self.optimizer = hvd.distribute(
            model or make_model(), OPTIMIZERS[optimizer](), guard=guard, **options
        )
        self.bad = None  # (position of the variable, values, rank)
        self.loss = 0.0
        self._step = tf.function(self._compute) if in_graph else self._compute

    def _compute(self, x, damage, loss):
        if self.shown:
            self.guard.watch({"x": x})
        with tf.GradientTape() as tape:
            error = tf.reduce_mean(tf.square(self.model(x, training=True)))
        if self.guard is not None:
            self.guard.watch(loss=error + loss)
        variables = self.model.trainable_variables
        gradients = tape.gradient(error, variables)
        gradients = [g if d is None else g + d for g, d in zip(gradients, damage, strict=True)]
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def __call__(self, x=None):
        damage = [np.zeros(v.shape, v.dtype) for v in self.model.trainable_variables]
        if self.bad is not None:
            position, found, rank = self.bad
            if hvd.rank() == rank:
                damage[position].reshape(-1)[: len(found)] = found
        x = batch() if x is None else x
        self._step(tf.constant(x), [tf.constant(d) for d in damage], tf.constant(self.loss))

    def state(self):
        return values([*self.model.variables, *self.optimizer.variables])


def batch(step=0):
    return np.random.default_rng(100 * step + hvd.rank()).normal(size=(6, 5)).astype("float32")


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def refusal_of(run, *arguments, in_graph):
    """The text of the error; of a graph TensorFlow makes an error of its own, with that text."""
    with pytest.raises(tf.errors.UnknownError if in_graph else NonFiniteGradient) as error:
        run(*arguments)
    text = str(run.guard.failure)
    assert text in str(error.value)
    assert text.startswith(f"rank {hvd.rank()} of {hvd.size()}: ")
    assert len(set(hvd.allgather_object(text.partition(": ")[2]))) == 1
    return text


@BOTH
@pytest.mark.parametrize("optimizer", matrix_but(["adam"], OPTIMIZERS))
def test_raise_names_rank_step_tensor_and_counts(optimizer, in_graph):
    run = Run(hvd.Guard(on_nonfinite="raise"), optimizer, in_graph)
    run()
    before = run.state()
    run.bad = (0, [NAN, NAN, INF], last())
    text = refusal_of(run, in_graph=in_graph)
    kernel = run.model.trainable_variables[0]
    assert "step 2:" in text
    found = (
        f"rank {last()}: 2 NaN and 1 infinite of 35 elements in {kernel.path!r} (float32 (5, 7))"
    )
    assert found in text
    assert "its input was not seen" in text
    assert text.count("elements in") == 1
    assert_same(run.state(), before)


@BOTH
def test_a_batch_that_was_shown_is_told_to_have_been_bad_or_not(in_graph):
    run = Run(hvd.Guard(), in_graph=in_graph, shown=True)
    run.bad = (1, [NAN], 0)
    assert "its input was finite" in refusal_of(run, in_graph=in_graph)
    run.bad = None
    x = batch()
    if hvd.rank() == last():
        x[0, :2] = NAN
        x[1, 1] = -INF
    text = refusal_of(run, x, in_graph=in_graph)
    assert f"rank {last()}: " in text
    assert "its input was bad already (2 NaN and 1 infinite elements)" in text


@BOTH
@pytest.mark.parametrize("optimizer", matrix_but(["sgd"], OPTIMIZERS))
def test_skip_leaves_weights_and_optimizer_state_alone_and_goes_on(optimizer, in_graph, caplog):
    guard = hvd.Guard(on_nonfinite="skip")
    run = Run(guard, optimizer, in_graph)
    run()
    before = run.state()
    run.bad = (2, [INF], last())
    with caplog.at_level(logging.WARNING, logger="hvdsync.guard"):
        run()
        run()
    assert guard.skipped == 2
    assert_same(run.state(), before)
    told = [r.getMessage() for r in caplog.records if r.name.startswith("hvdsync.guard")]
    if hvd.rank() == 0:
        assert len(told) == 2
        assert f"rank {last()}: 1 infinite of 7 elements" in told[0]
        assert "left out on all ranks, 2 so far" in told[1]
    else:
        assert told == []
    run.bad = None
    run()
    assert guard.skipped == 2
    assert not np.array_equal(run.state()[0], before[0])
    assert all(np.isfinite(v).all() for v in run.state())
    assert_equal_on_all_ranks([*run.model.variables, *run.optimizer.variables])


def test_warn_makes_the_update_and_rank_zero_says_so(caplog):
    run = Run(hvd.Guard(on_nonfinite="warn"))
    run.bad = (3, [NAN], last())
    with caplog.at_level(logging.WARNING, logger="hvdsync.guard"):
        run()
    assert np.isnan(run.model.trainable_variables[3].numpy()).all()
    assert np.isfinite(run.model.trainable_variables[0].numpy()).all()
    told = [r.getMessage() for r in caplog.records if "made all the same" in r.getMessage()]
    assert len(told) == (hvd.rank() == 0)


@BOTH
def test_finite_gradients_whose_sum_overflows_are_no_ranks_fault(in_graph):
    if hvd.size() < 2:
        pytest.skip("one rank sums nothing")
    run = Run(hvd.Guard(), in_graph=in_graph)
    before = run.state()
    run.bad = (2, [3e38, 1.0, 3e38], hvd.rank())
    text = refusal_of(run, in_graph=in_graph)
    name = run.model.trainable_variables[2].path
    assert f"their sum over ranks is not: it overflows in 2 of 7 elements of {name!r}" in text
    assert_same(run.state(), before)


def test_large_gradients_that_are_finite_are_let_through():
    run = Run(hvd.Guard())
    run.bad = (2, [1e30], last())
    run()
    assert np.isfinite(run.model.trainable_variables[2].numpy()).all()
    assert abs(run.model.trainable_variables[2].numpy()[0, 0]) > 1e28
    assert run.guard.failure is None


def test_half_precision_on_the_wire_overflows_where_no_gradient_did():
    if hvd.size() < 2:
        pytest.skip("nothing travels")
    run = Run(hvd.Guard(), compression=hvd.Compression.fp16)
    run.bad = (0, [5e4], 0)
    run()
    run.bad = (0, [1e6], 0)
    assert "overflows in 1 of 35 elements" in refusal_of(run, in_graph=True)


class Embedding(keras.Model):
    def __init__(self):
        super().__init__()
        self.rows = keras.layers.Embedding(10, 3)
        self.head = keras.layers.Dense(1)

    def call(self, x):
        return self.head(self.rows(x))


@BOTH
@pytest.mark.parametrize("rows_bad", [True, False])
def test_sparse_gradients_are_judged(rows_bad, in_graph):
    guard = hvd.Guard(on_nonfinite="skip")
    model = Embedding()
    x = tf.constant([[hvd.rank(), 5]])
    model(x)
    model, optimizer = hvd.distribute(model, keras.optimizers.SGD(0.1), guard=guard)

    def compute(damage):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        rows, *rest = tape.gradient(loss, model.trainable_variables)
        if rows_bad:
            rows = tf.IndexedSlices(rows.values + damage, rows.indices, rows.dense_shape)
        else:
            rest[0] = rest[0] + damage
        optimizer.apply_gradients(zip([rows, *rest], model.trainable_variables, strict=True))

    step = tf.function(compute) if in_graph else compute
    step(tf.constant(0.0))
    before = values([*model.variables, *optimizer.variables])
    step(tf.constant(NAN if hvd.rank() == 0 else 0.0))
    assert guard.skipped == 1
    assert_same(values([*model.variables, *optimizer.variables]), before)
    step(tf.constant(0.0))
    assert guard.skipped == 1
    assert not np.array_equal(model.rows.embeddings.numpy(), before[0])


def test_a_variable_of_each_rank_alone_is_judged_for_all():
    run = Run(hvd.Guard(on_nonfinite="skip"))
    run.optimizer.register_local_var(run.model.trainable_variables[1])
    run()
    before = run.state()
    run.bad = (1, [NAN], 0)
    run()
    assert run.guard.skipped == 1
    assert_same(run.state(), before)


def test_one_large_variable_alone_is_judged():
    guard = hvd.Guard(on_nonfinite="skip")
    variable = tf.Variable(tf.ones([7]))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), guard=guard)
    step = tf.function(lambda g: optimizer.apply([g], [variable]))
    step(tf.ones([7]))
    bad = np.ones(7, "float32")
    bad[3] = INF if hvd.rank() == last() else 1.0
    step(tf.constant(bad))
    assert guard.skipped == 1
    np.testing.assert_allclose(variable.numpy(), 0.9)


@pytest.mark.parametrize("bad_pass", [0, 1])
def test_a_bad_pass_among_several_leaves_out_their_step(bad_pass):
    run = Run(hvd.Guard(on_nonfinite="skip"), accumulate=2)
    for number in range(2):
        run(batch(number))
    before = run.state()
    for number in range(2):
        run.bad = (0, [NAN], last()) if number == bad_pass else None
        run(batch(number))
    assert run.guard.skipped == 1
    assert_same(run.state(), before)
    run.bad = None
    for number in range(2):
        run(batch(number))
    assert run.guard.skipped == 1
    assert all(np.isfinite(v).all() for v in run.state())
    assert not np.array_equal(run.state()[0], before[0])


@BOTH
def test_a_loss_that_is_nan_counts_where_its_gradient_is_finite(in_graph):
    run = Run(hvd.Guard(), in_graph=in_graph)
    run()
    before = run.state()
    run.loss = NAN if hvd.rank() == last() else 0.0
    text = refusal_of(run, in_graph=in_graph)
    assert f"rank {last()}: a loss that is NaN or infinite, and its gradients are finite" in text
    assert_same(run.state(), before)


def test_a_loss_scaler_leaves_out_its_steps_before_any_verdict():
    guard = hvd.Guard()
    model = make_model()
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=1024.0)
    model, optimizer = hvd.distribute(model, scaler, guard=guard)
    gradients = [np.ones(v.shape, "float32") for v in model.trainable_variables]
    step = tf.function(lambda g: optimizer.apply(g, model.trainable_variables))
    step(gradients)
    before = values(model.variables)
    bad = [g.copy() for g in gradients]
    bad[0][0, 0] = INF if hvd.rank() == last() else 1.0
    step(bad)
    assert float(optimizer.dynamic_scale) == 512.0
    assert_same(values(model.variables), before)
    step(gradients)
    assert guard.failure is None and guard.skipped == 0
    assert not np.array_equal(values(model.variables)[0], before[0])


@BOTH
def test_without_trouble_a_guard_changes_no_bit(in_graph):
    guarded, plain = (Run(guard, "adam", in_graph) for guard in (hvd.Guard(), None))
    for number in range(3):
        guarded(batch(number))
        plain(batch(number))
    assert_same(guarded.state(), plain.state())


def test_a_compiled_function_says_what_to_do():
    run = Run(hvd.Guard())
    step = tf.function(run._compute, jit_compile=True)
    with pytest.raises(HvdsyncError, match="jit_compile"):
        step(tf.constant(batch()), [None] * 4, tf.constant(0.0))


def test_optimizers_of_tensorflow_1_are_refused():
    with pytest.raises(ValueError, match="GradientDescentOptimizer"):
        hvd.DistributedOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(0.1), guard=hvd.Guard()
        )
