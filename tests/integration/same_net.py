"""One rank of ``test_frameworks_agree``: trains the given net on its shards of the given batches.

Arguments: framework (torch, tensorflow, keras), ``.npz`` with weights and batches, output ``.npz``.
"""

import sys

import numpy as np

LEARNING_RATE, MOMENTUM = 0.1, 0.9


def train_torch(weights, shards):
    import torch

    import hvdsync.torch as hvd

    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.from_numpy(value.T if value.ndim == 2 else value))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    model, optimizer = hvd.distribute(model, optimizer)
    for x, y in shards:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
        loss.backward()
        optimizer.step()
    arrays = [p.detach().numpy() for p in model.parameters()]
    return [a.T if a.ndim == 2 else a for a in arrays]


def keras_model(weights):
    import keras

    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
    )
    model.set_weights(weights)
    optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, optimizer, loss


def train_tensorflow(weights, shards):
    import tensorflow as tf

    import hvdsync.tensorflow as hvd

    model, optimizer, loss_of = keras_model(weights)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for x, y in shards:
        step(tf.constant(x), tf.constant(y))
    return model.get_weights()


def train_keras(weights, shards):
    import hvdsync.keras as hvd

    model, optimizer, loss = keras_model(weights)
    model.compile(optimizer=hvd.distribute(optimizer), loss=loss)
    x, y = (np.concatenate(parts) for parts in zip(*shards, strict=True))
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(x, y, batch_size=len(shards[0][0]), shuffle=False, verbose=0, callbacks=callbacks)
    return model.get_weights()


def main(framework, source, target):
    import importlib

    hvd = importlib.import_module(f"hvdsync.{framework}")
    hvd.init()
    given = np.load(source)
    weights = [given[f"weight{i}"] for i in range(4)]
    rank, size = hvd.rank(), hvd.size()
    shards = [
        (np.ascontiguousarray(x[rank::size]), np.ascontiguousarray(y[rank::size]))
        for x, y in zip(given["x"], given["y"], strict=True)
    ]
    train = {"torch": train_torch, "tensorflow": train_tensorflow, "keras": train_keras}
    trained = train[framework](weights, shards)
    for other in hvd.allgather_object([w.tobytes() for w in trained]):
        assert other == [w.tobytes() for w in trained], "the ranks differ"
    if rank == 0:
        np.savez(target, *trained)


if __name__ == "__main__":
    main(*sys.argv[1:])
