"""What is saved: plain files, written by rank 0, from which training goes on exactly."""

import json
import zipfile

import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from hvdsync.errors import CheckpointError
from tests.parallel.cases import thinned
from tests.parallel.keras.helpers import (
    assert_equal_on_all_ranks,
    data,
    fit,
    fit_together,
    make_model,
    values,
)
from tests.parallel.processes import without_hvdsync
from tests.parallel.ranks import shard

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.02),
    "LossScale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
}


@pytest.mark.parametrize(("kind", "suffix"), thinned(OPTIMIZERS, [".keras", ".h5"]))
def test_saved_models_name_the_plain_optimizer_and_load_with_its_state(tmp_path, kind, suffix):
    model = fit_together(hvd.distribute(OPTIMIZERS[kind]()), 1)
    path = tmp_path / f"model{suffix}"
    model.save(path)
    if suffix == ".keras":
        plain = make_model()
        plain.compile(OPTIMIZERS[kind](), "mse")
        plain.save(tmp_path / "plain.keras")
        config, expected = (
            json.loads(zipfile.ZipFile(p).read("config.json"))["compile_config"]["optimizer"]
            for p in (path, tmp_path / "plain.keras")
        )
        for key in ("module", "class_name", "registered_name"):
            assert config[key] == expected[key]
    loaded = keras.models.load_model(path)
    assert type(loaded.optimizer).__name__ == type(OPTIMIZERS[kind]()).__name__
    # Keras itself leaves slots out of the older format.
    kept = loaded.optimizer.variables if suffix == ".keras" else []
    expected = model.optimizer.variables if suffix == ".keras" else []
    for a, b in zip(
        values(loaded.variables + kept), values(model.variables + expected), strict=True
    ):
        assert np.array_equal(a, b)


def test_a_saved_model_loads_where_neither_hvdsync_nor_horovod_can_be_imported(shared_path):
    model = fit_together(hvd.distribute(keras.optimizers.Adam(0.02)), 1)
    path, x = shared_path / "model.keras", data()[0]
    hvd.rank_zero_only(model.save)(path)
    script = """
        import sys

        import keras, numpy
        model = keras.models.load_model(sys.argv[1])
        print(int(model.optimizer.iterations))
        numpy.save(sys.argv[2], model.predict(numpy.load(sys.argv[3]), verbose=0))
    """
    if hvd.rank() == 0:
        np.save(shared_path / "x.npy", x)
        files = [str(shared_path / name) for name in ("model.keras", "out.npy", "x.npy")]
        assert int(without_hvdsync(script, *files)) == int(model.optimizer.iterations)
        found = np.load(shared_path / "out.npy")
        np.testing.assert_allclose(found, model.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


def test_load_model_distributes_the_optimizer_again_and_training_goes_on_exactly(shared_path):
    unbroken = fit_together(hvd.distribute(keras.optimizers.Adam(0.02)), 4)
    half = fit_together(hvd.distribute(keras.optimizers.Adam(0.02)), 2)
    path = shared_path / "half.keras"
    hvd.rank_zero_only(half.save)(path)
    hvd.agree_all(True)  # written
    loaded = hvd.load_model(path)
    fit(loaded, *shard(*data()), 12 // hvd.size(), 2)
    assert_equal_on_all_ranks(loaded.variables + loaded.optimizer.variables)
    for a, b in zip(values(loaded.variables), values(unbroken.variables), strict=True):
        assert a.tobytes() == b.tobytes()


def test_checkpoints_restore_exactly_on_every_rank_and_rank_zero_alone_writes(tmp_path):
    """Each rank has a directory of its own; only rank 0's is written to."""
    unbroken = fit_together(hvd.distribute(keras.optimizers.Adam(0.02)), 4)
    half = fit_together(hvd.distribute(keras.optimizers.Adam(0.02)), 2)
    own = tmp_path / f"rank{hvd.rank()}"
    checkpoint = hvd.Checkpoint(own, keep=2)
    for step in (1, 2, 3):
        checkpoint.save(step, model=half, epoch=2, sampler=hvd.DistributedSampler(10))
    folders = sorted(p.name for p in own.glob("step-*"))
    assert folders == (["step-00000002", "step-00000003"] if hvd.rank() == 0 else [])
    if hvd.rank() == 0:
        keras.models.load_model(own / "step-00000003" / "model.keras")

    fresh = make_model()
    for v in fresh.variables:
        v.assign(v * 0 + hvd.rank())
    fresh.compile(hvd.distribute(keras.optimizers.Adam(0.5)), "mse")
    found = checkpoint.restore(model=fresh)
    assert (found["step"], found["epoch"]) == (3, 2)
    fit(fresh, *shard(*data()), 12 // hvd.size(), 2)
    assert_equal_on_all_ranks(fresh.variables + fresh.optimizer.variables)
    for a, b in zip(values(fresh.variables), values(unbroken.variables), strict=True):
        assert a.tobytes() == b.tobytes()
    checkpoint.close()


def test_bare_optimizers_and_variables_become_arrays(tmp_path):
    model = make_model()
    optimizer = keras.optimizers.Adam(0.02)
    optimizer.build(model.trainable_variables)
    v = keras.Variable(np.arange(3.0), dtype="float32")
    narrow = keras.Variable([1.5, -2.0], dtype="bfloat16")
    checkpoint = hvd.Checkpoint(tmp_path)
    optimizer.learning_rate = 0.125
    checkpoint.save(7, optimizer=optimizer, v=v, narrow=narrow)
    optimizer.learning_rate = 1.0
    v.assign(v * 0)
    narrow.assign(narrow * 0)
    assert checkpoint.restore(optimizer=optimizer, v=v, narrow=narrow)["step"] == 7
    assert float(keras.ops.convert_to_numpy(optimizer.learning_rate)) == 0.125
    assert values([v])[0].tolist() == [0.0, 1.0, 2.0]
    assert values([narrow])[0].astype("float32").tolist() == [1.5, -2.0]
    if hvd.rank() == 0:
        with np.load(tmp_path / "step-00000007" / "v.npz", allow_pickle=False) as stored:
            assert stored["000000"].tolist() == [0.0, 1.0, 2.0]
    checkpoint.close()


def test_a_checkpoint_of_another_model_is_refused_on_every_rank(tmp_path):
    checkpoint = hvd.Checkpoint(tmp_path)
    checkpoint.save(1, model=make_model())
    with pytest.raises(CheckpointError):
        checkpoint.restore(model=make_model(features=6))
    checkpoint.close()


def test_the_checkpoint_callback_resumes_in_the_epoch_after(tmp_path):
    directory = hvd.broadcast_object(tmp_path)

    def run(epochs):
        callbacks = [hvd.callbacks.CheckpointCallback(directory)]
        model = make_model()
        model.compile(hvd.distribute(keras.optimizers.Adam(0.02)), "mse")
        history = fit(model, *shard(*data()), 12 // hvd.size(), epochs, callbacks=callbacks)
        return model, history.epoch

    unbroken = fit_together(hvd.distribute(keras.optimizers.Adam(0.02)), 4)
    assert run(2)[1] == [0, 1]
    model, epochs = run(4)
    assert epochs == [2, 3]
    for a, b in zip(values(model.variables), values(unbroken.variables), strict=True):
        assert a.tobytes() == b.tobytes()


def test_the_best_model_is_written_by_rank_zero(tmp_path):
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = str(tmp_path / "best.keras")
    callbacks = [best, hvd.callbacks.MetricAverageCallback()]
    fit_together(hvd.distribute(keras.optimizers.SGD(0.05)), 2, callbacks=callbacks)
    assert (tmp_path / "best.keras").exists() == (hvd.rank() == 0)
