"""``fit`` on ranks with unequal numbers of batches ends together, by the policy that was chosen."""

import logging

import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from hvdsync.errors import DataError, RankMismatch
from tests.parallel.cases import thinned
from tests.parallel.keras.helpers import assert_close, assert_equal_on_all_ranks, make_model

SIZE = 4
pytestmark = pytest.mark.usefixtures("several_ranks")


def shares(least=10):
    """The samples of each rank: rank r has ``least + r`` batches of ``SIZE``."""
    rng = np.random.default_rng(0)
    everyone = []
    for rank in range(hvd.size()):
        x = rng.normal(size=(SIZE * (least + rank), 5)).astype("float32")
        everyone.append((x, np.tanh(x.sum(1, keepdims=True)).astype("float32")))
    return everyone


def cut(x, y):
    return [(x[i : i + SIZE], y[i : i + SIZE]) for i in range(0, len(x), SIZE)]


class Batches(keras.utils.PyDataset):
    def __init__(self, x, y):
        super().__init__()
        self._batches = cut(x, y)

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        return self._batches[index]


def as_arrays(x, y):
    return (x, y), {"batch_size": SIZE}


def as_py_dataset(x, y):
    return Batches(x, y), {}


def as_tf_data(x, y):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).batch(SIZE), {}


def as_tf_data_of_unknown_length(x, y):
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(SIZE)
    return dataset.filter(lambda *_: True), {}


def as_loader(x, y):
    import torch

    dataset = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return torch.utils.data.DataLoader(dataset, SIZE), {}


KINDS = [as_arrays, as_py_dataset, as_tf_data, as_tf_data_of_unknown_length, as_loader]


class Count(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1


def compiled(optimizer, **arguments):
    model = make_model()
    model.compile(optimizer, keras.losses.MeanSquaredError(), **arguments)
    return model


def rates():
    return keras.optimizers.SGD(0.2, momentum=0.9)


def fit_alone(steps, epochs):
    """One process, on the samples that all ranks together have in each step."""
    model = compiled(rates())
    everyone = [cut(*share) for share in shares()]
    for _ in range(epochs):
        for step in range(steps):
            present = [batches[step] for batches in everyone if step < len(batches)]
            model.train_on_batch(*map(np.concatenate, zip(*present, strict=True)))
    return model


@pytest.mark.parametrize(("policy", "kind"), thinned(["min", "pad"], KINDS))
def test_ten_and_eleven_batches_end_together_as_in_one_process(policy, kind, caplog):
    data, options = kind(*shares()[hvd.rank()])
    with caplog.at_level(logging.INFO, "hvdsync.data.uneven"):
        data = hvd.even_batches(data, policy, **options)
    told = (
        f"batches by rank: {', '.join(str(10 + r) for r in range(hvd.size()))}; policy '{policy}'"
    )
    assert (told in caplog.text) == (hvd.rank() == 0)
    model, count = compiled(hvd.distribute(rates())), Count()
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[start, count])
    steps = 10 if policy == "min" else 10 + hvd.size() - 1
    assert hvd.allgather_object(count.batches) == [2 * steps] * hvd.size()
    assert_equal_on_all_ranks(model.trainable_variables)
    assert_close(model.trainable_variables, fit_alone(steps, 2).trainable_variables)


def test_without_a_policy_it_is_refused_at_once_with_both_counts():
    model = compiled(hvd.distribute(rates()))
    start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    with pytest.raises(RankMismatch, match=r"number of batches.*10.*11.*hvd.even_batches"):
        model.fit(*shares()[hvd.rank()], batch_size=SIZE, verbose=0, callbacks=[start])


def test_what_is_repeated_does_not_count_in_weighted_metrics():
    x, y = shares(least=1)[hvd.rank()]
    model = compiled(hvd.distribute(keras.optimizers.SGD(0.0)), weighted_metrics=["mse"])
    data = hvd.even_batches((x, y, np.full(len(x), 0.5, "float32")), "pad", batch_size=SIZE)
    seen = model.fit(data, verbose=0, shuffle=False).history["mse"][0]
    weights = [hvd.size() / (hvd.size() - i) for i in range(hvd.rank() + 1)]
    errors = (model.predict(x, verbose=0) - y) ** 2
    parts = [errors[i * SIZE : (i + 1) * SIZE].mean() for i in range(hvd.rank() + 1)]
    assert seen == pytest.approx(np.average(parts, weights=weights), rel=1e-4)


def test_equal_shares_are_given_back_as_they_are():
    x, y = shares()[0]
    data = Batches(x, y)
    assert hvd.even_batches(data, "pad") is data
    assert hvd.even_batches(data) is data


def test_data_that_cannot_be_evened_is_refused_on_every_rank():
    x, y = shares(least=0)[hvd.rank()]
    with pytest.raises(DataError, match="rank 0 has no batch at all"):
        hvd.even_batches((x, y), "pad", batch_size=SIZE)

    class Endless(Batches):
        num_batches = None

    x, y = shares()[hvd.rank()]
    data = Endless(x, y) if hvd.rank() else Batches(x, y)
    with pytest.raises(DataError, match="rank 1 has data that never ends"):
        hvd.even_batches(data, "pad")
    assert len(hvd.even_batches(data)) == 10
    with pytest.raises(ValueError, match="no place in fit"):
        hvd.even_batches(data, "join")
    with pytest.raises(ValueError, match="batch_size is for arrays"):
        hvd.even_batches(data, batch_size=3)
