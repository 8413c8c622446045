"""Checkpoints of Keras on several ranks: what the file holds, whose random numbers come back."""

import io
import logging
import random
import zipfile
from contextlib import nullcontext

import h5py
import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from hvdsync.checkpoint import keras_archive, store
from hvdsync.errors import CheckpointError
from tests import disks
from tests.parallel.keras.helpers import (
    assert_equal_on_all_ranks,
    fit,
    fit_together,
    make_model,
    shard,
    values,
)
from tests.parallel.keras.helpers import data as make_data
from tests.parallel.processes import without_hvdsync

MODES = pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])


@keras.saving.register_keras_serializable("hvdsync-test")
class Odd(keras.layers.Layer):
    """Saves what is no variable, and a file beside."""

    def __init__(self, **named):
        super().__init__(**named)
        self.table = np.zeros(3)

    def call(self, inputs):
        return inputs

    def save_own_variables(self, store):
        store["table"] = self.table

    def load_own_variables(self, store):
        self.table = np.array(store["table"])

    def save_assets(self, folder):
        with open(f"{folder}/words.txt", "w") as file:
            file.write(" ".join(map(str, self.table)))

    def load_assets(self, folder):
        with open(f"{folder}/words.txt") as file:
            self.words = file.read()


def odd_model():
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(7, "tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.25, seed=1),
            Odd(name="odd"),
            keras.layers.Dense(1, dtype="bfloat16"),
            keras.layers.Activation("linear", dtype="float32"),
        ]
    )
    model.compile(hvd.distribute(keras.optimizers.Adam(0.02)), "mse")
    fit(model, *shard(*make_data()), 12 // hvd.size(), 1)
    return model


def content(path):
    """What a .keras file holds: arrays and attributes of its weights, and its other files."""
    found = {}
    with zipfile.ZipFile(path) as file:
        for name in file.namelist():
            if name not in ("model.weights.h5", "metadata.json"):
                found[name] = file.read(name)
        with h5py.File(io.BytesIO(file.read("model.weights.h5"))) as weights:

            def visit(name, node):
                found[f"{name} attributes"] = dict(node.attrs)
                if isinstance(node, h5py.Dataset):
                    found[name] = (node.shape, node[()].tobytes(), node.dtype)

            weights.visititems(visit)
    return found


def test_a_background_save_holds_what_keras_would_have_saved_at_its_moment(shared_path, caplog):
    model = odd_model()
    expected = shared_path / "expected.keras"
    hvd.rank_zero_only(model.save)(expected)
    # Rank 0's: statistics of batch normalisation are each rank's own.
    at_save = hvd.broadcast_object(values(model.weights + model.optimizer.variables))
    checkpoint = hvd.Checkpoint(shared_path / "run", background=True)
    folder = checkpoint.save(1, model=model)
    model.get_layer("odd").table += 1  # the very array that the layer handed over
    fit(model, *shard(*make_data()), 12 // hvd.size(), 1)
    checkpoint.wait()
    assert caplog.records == []
    if hvd.rank() == 0:
        found = content(folder / "model.keras")
        assert found == content(expected)
        assert "assets/layers/odd/words.txt" in found
        loaded = keras.models.load_model(folder / "model.keras")
        assert type(loaded.optimizer).__name__ == "Adam"
        for a, b in zip(values(loaded.weights + loaded.optimizer.variables), at_save, strict=True):
            assert a.tobytes() == b.tobytes()
    assert checkpoint.restore(model=model)["step"] == 1
    for a, b in zip(values(model.weights + model.optimizer.variables), at_save, strict=True):
        assert a.tobytes() == b.tobytes()
    checkpoint.close()


@pytest.mark.slow
def test_the_file_of_a_background_save_opens_where_hvdsync_and_horovod_cannot_be_imported(
    shared_path,
):
    model = fit_together(hvd.distribute(keras.optimizers.Adam(0.02)), 1)
    with hvd.Checkpoint(shared_path, background=True) as checkpoint:
        folder = checkpoint.save(1, model=model)
    script = """
        import sys

        import keras
        model = keras.models.load_model(sys.argv[1])
        print(type(model.optimizer).__name__, int(model.optimizer.iterations))
        print(keras.ops.convert_to_numpy(model.layers[0].kernel).tolist())
    """
    if hvd.rank() == 0:
        optimizer, kernel = without_hvdsync(script, folder / "model.keras").splitlines()
        assert optimizer == f"Adam {int(model.optimizer.iterations)}"
        assert kernel == str(values([model.layers[0].kernel])[0].tolist())
    hvd.agree_all(True)


def test_a_keras_that_saves_in_another_way_is_used_as_it_is_and_said_once(
    shared_path, caplog, monkeypatch
):
    def unknown(_):
        raise AttributeError("_save_state")

    monkeypatch.setattr(keras_archive, "record", unknown)
    model = fit_together(hvd.distribute(keras.optimizers.Adam(0.02)), 1)
    with (
        caplog.at_level(logging.WARNING, "hvdsync"),
        hvd.Checkpoint(shared_path, background=True) as checkpoint,
    ):
        for step in (1, 2):
            folder = checkpoint.save(step, model=model)
    if hvd.rank() == 0:
        said = [
            r
            for r in caplog.records
            if "saves in a way that hvdsync does not know" in r.msg % r.args
        ]
        assert len(said) == 1
        loaded = keras.models.load_model(folder / "model.keras")
        for a, b in zip(values(loaded.weights), values(model.weights), strict=True):
            assert a.tobytes() == b.tobytes()


def dropout_model():
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(7), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    )
    for i, v in enumerate(model.trainable_variables):
        v.assign(np.random.default_rng(i).normal(size=v.shape))
    return model


def test_each_rank_goes_on_with_its_own_dropout_and_numbers(shared_path):
    random.seed(hvd.rank())
    np.random.seed(hvd.rank())
    keras.utils.set_random_seed(10 + hvd.rank())
    model = dropout_model()
    generator = keras.random.SeedGenerator(90 + hvd.rank())
    x = np.ones((4, 5), "float32")

    def draws():
        numbers = [
            keras.ops.convert_to_numpy(model(x, training=True)),
            keras.ops.convert_to_numpy(keras.random.normal((3,), seed=generator)),
            keras.ops.convert_to_numpy(keras.random.normal((3,))),  # the global seed generator
            keras.layers.Dropout(0.5).seed_generator.state.numpy(),  # drawn from Python's random
            np.random.rand(2),
        ]
        return [number.tolist() for number in numbers]

    draws()
    with hvd.Checkpoint(shared_path) as checkpoint:
        state = hvd.RandomState(model, generator)
        checkpoint.save(1, model=model, random=state)
        expected = [draws() for _ in range(3)]
        assert len({str(other) for other in hvd.allgather_object(expected)}) == hvd.size()
        checkpoint.restore(model=model, random=state)
        assert [draws() for _ in range(3)] == expected
        # Without it a restored model leaves each rank's dropout where it is.
        seed = model.layers[1].seed_generator.state
        before = values([seed])[0]
        checkpoint.restore(model=model)
        assert values([seed])[0].tolist() == before.tolist()


def test_a_model_without_random_layers_has_no_streams_of_its_own(shared_path):
    state = hvd.RandomState(make_model()).state_dict()
    assert {"python", "numpy", "keras"} < set(state["streams"])
    assert not any(name.startswith("seed") for name in state["streams"])
    with pytest.raises(ValueError, match="found dict, expected a generator"):
        hvd.RandomState({})


def test_another_model_is_told_by_its_arrays_and_not_changed(shared_path):
    with hvd.Checkpoint(shared_path) as checkpoint:
        model = make_model(norm=True)
        model.compile(keras.optimizers.Adam(), "mse")
        model.optimizer.build(model.trainable_variables)
        checkpoint.save(1, model=model)
        other = make_model(features=6)
        before = values(other.variables)
        with pytest.raises(CheckpointError) as error:
            checkpoint.restore(model=other)
        said = str(error.value)
        assert "not expected: layers/batch_normalization/vars/0 (7,)" in said
        assert "layers/dense/vars/0: found (5, 7), expected (6, 7)" in said
        assert "optimizer" not in said  # this one has none, and needs none
        for a, b in zip(values(other.variables), before, strict=True):
            assert a.tobytes() == b.tobytes()
        deeper = keras.Sequential([*make_model(norm=True).layers, keras.layers.Dense(3)])
        deeper.build((None, 5))
        with pytest.raises(CheckpointError, match=r"missing: layers/dense_2/vars/0 \(1, 3\)"):
            checkpoint.restore(model=deeper)


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_model_that_one_rank_has_not_built_is_an_error_on_all(shared_path, which):
    unlucky = 0 if which == "first" else hvd.size() - 1
    with hvd.Checkpoint(shared_path) as checkpoint:
        checkpoint.save(1, model=make_model())
        model = make_model()
        if hvd.rank() == unlucky:
            model = keras.Sequential([keras.layers.Dense(7, "tanh"), keras.layers.Dense(1)])
        expected = "is not built yet"
        if unlucky and hvd.rank() != unlucky:
            expected = "another rank could not use"
        with pytest.raises(CheckpointError, match=expected):
            checkpoint.restore(model=model)


@MODES
def test_a_full_disk_raises_on_all_ranks_and_leaves_what_was_there(shared_path, background):
    context = disks.small(shared_path / "disk", 3) if hvd.rank() == 0 else nullcontext()
    with context:
        hvd.agree_all(True)
        checkpoint = hvd.Checkpoint(shared_path / "disk" / "run", background=background)
        checkpoint.save(1, model=make_model())
        large = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1000)])
        with pytest.raises(CheckpointError, match=r"step 2 could not be written.*are free there"):
            checkpoint.save(2, model=large)
            checkpoint.wait()
        assert checkpoint.latest() == 1
        checkpoint.save(3, model=make_model())
        checkpoint.close()
        assert checkpoint.latest() == 3
        hvd.agree_all(True)


def test_objects_in_arrays_are_not_unpickled(shared_path):
    def hostile(folder):
        (folder / "values.json").write_text("{}")
        objects = np.array([{"code": "would run"}], dtype=object)
        np.savez(folder / "v.npz", **{"000000": objects})

    if hvd.rank() == 0:
        writer = store.Store(shared_path, 1)
        writer.write(1, hostile, {"items": ["v"]})
        writer.close()
    hvd.agree_all(True)
    with pytest.raises(CheckpointError, match="allow_pickle"):
        hvd.Checkpoint(shared_path).restore(v=keras.Variable([1.0]))


def test_variables_of_another_shape_are_named(shared_path):
    with hvd.Checkpoint(shared_path) as checkpoint:
        checkpoint.save(1, v=keras.Variable([1.0, 2.0], name="v"))
        with pytest.raises(CheckpointError, match=r"v: found \(2,\), expected \(3,\)"):
            checkpoint.restore(v=keras.Variable([1.0, 2.0, 3.0], name="v"))


def test_the_best_model_comes_back_on_every_rank(shared_path):
    model = make_model()
    with hvd.Checkpoint(
        shared_path, keep=1, background=True, best="loss", mode="min"
    ) as checkpoint:
        for step, loss in [(1, 0.5), (2, 0.25), (3, 0.75)]:
            model.layers[0].bias.assign(np.full(7, step))
            checkpoint.save(step, model=model, loss=loss)
        assert checkpoint.best() == 2
        assert checkpoint.restore_best(model=model)["loss"] == 0.25
    assert_equal_on_all_ranks(model.variables)
    assert values([model.layers[0].bias])[0].tolist() == [2.0] * 7
