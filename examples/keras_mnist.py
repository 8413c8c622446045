"""MNIST with Keras on several workers, to about 97 % test accuracy:
horovodrun -np 2 python examples/keras_mnist.py"""

import argparse

import keras

import hvdsync.keras as hvd
from hvdsync.data import mnist, to_float

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--steps", type=int, help="stop an epoch after so many")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(0)

data = mnist.load()
# Each worker trains on its own part of the images and tests on its own part: [rank::size].
train, test = (slice(hvd.rank(), n, hvd.size()) for n in (60_000, 10_000))
# Keras wants equally many batches on every worker: 60,000 divides by 2, 3, 4, 5, 6 and 8.

layers = keras.layers
model = keras.Sequential([layers.Flatten(), layers.Dense(128, "relu"), layers.Dense(10)])
# Workers together take a batch that is size() times as large: the step may be larger too.
optimizer = keras.optimizers.Adam(hvd.scale_learning_rate(0.001, "sqrt"))
model.compile(
    optimizer=hvd.distribute(optimizer),  # gradients are averaged over the workers
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
callbacks = [
    # All start from worker 0's weights.
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    # What is shown at the end of an epoch is over the images of all workers.
    hvd.callbacks.MetricAverageCallback(),
    # Worker 0 alone writes; plain keras.models.load_model opens model.keras in that folder.
    hvd.callbacks.CheckpointCallback("checkpoints/keras-mnist", resume=False),
]
model.fit(
    to_float(data.x_train[train]),
    data.y_train[train],
    batch_size=64,
    epochs=args.epochs,
    steps_per_epoch=args.steps,
    callbacks=callbacks,
    verbose=2 if hvd.rank() == 0 else 0,  # one worker speaks for all
)

images, labels = to_float(data.x_test[test]), data.y_test[test]
right = model.evaluate(images, labels, verbose=0, return_dict=True)["accuracy"]
accuracy = hvd.average_metrics({"accuracy": right}, weight=len(labels))["accuracy"]
if hvd.rank() == 0:
    print(f"test accuracy {accuracy:.2%}")
