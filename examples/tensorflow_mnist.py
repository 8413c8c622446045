"""MNIST with TensorFlow on several workers, to about 97 % test accuracy:
horovodrun -np 2 python examples/tensorflow_mnist.py"""

import argparse

import tensorflow as tf

import hvdsync.tensorflow as hvd
from hvdsync.data import mnist, to_float

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2800, help="of one worker; several share them")
args = parser.parse_args()

hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)  # workers share the machine's cores
tf.keras.utils.set_random_seed(0)

data = mnist.load()
dataset = tf.data.Dataset.from_tensor_slices((to_float(data.x_train), data.y_train))
dataset = hvd.shard(dataset)  # each worker reads its own part
dataset = dataset.repeat().shuffle(10_000).batch(64)

layers = tf.keras.layers
model = tf.keras.Sequential([layers.Flatten(), layers.Dense(128, "relu"), layers.Dense(10)])
loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# Workers together take a batch that is size() times as large: the step may be larger too.
optimizer = tf.keras.optimizers.Adam(hvd.scale_learning_rate(0.001, "sqrt"))


@tf.function
def train(images, labels, first_batch):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    # The wrapped tape gives the average of all workers' gradients.
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first_batch:
        # Only now do all variables exist; all workers go on from worker 0's.
        hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
    return loss


# More workers need fewer steps for the same number of images.
for step, (images, labels) in enumerate(dataset.take(args.steps // hvd.size())):
    loss = train(images, labels, step == 0)
    if step % 100 == 0 and hvd.rank() == 0:  # one worker speaks for all
        print(f"step {step}: loss {loss:.4f}", flush=True)

# Each of the 10,000 test images is counted by one worker, whatever their number.
mine = slice(hvd.rank(), None, hvd.size())
guesses = tf.argmax(model(to_float(data.x_test[mine])), 1).numpy()
right = (guesses == data.y_test[mine]).mean()
accuracy = hvd.average_metrics({"accuracy": right}, weight=len(guesses))["accuracy"]
if hvd.rank() == 0:
    # Writers of one path would spoil one another's file: worker 0 alone writes.
    tf.train.Checkpoint(model=model, optimizer=optimizer).save("checkpoints/tensorflow-mnist/model")
    print(f"test accuracy {accuracy:.2%}")
