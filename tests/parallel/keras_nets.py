"""Nets that reductions get wrong easily, for the parity suites of TensorFlow and of Keras.

Everything is in float64. Ranks differ from one process in the order of sums only, a few units in
the last place (1e-16) a step; 1e-9 after a handful of steps, square roots and divisions of Adam
included, is generous and still catches any real error. On its PyTorch backend Keras rounds some
values of a step to float32 (1e-7), in a plain process too: there it is 1e-5.
"""

import keras
import numpy as np

from hvdsync.comm import verbs

TOLERANCE = 1e-5 if keras.backend.backend() == "torch" else 1e-9
STEPS = 6
SAMPLES = 24  # divides by 1, 2, 3 and 4 ranks, and by two passes on each

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
}

# Whatever Keras does with gradients on its way to an update, for models in float32.
FEATURES = {
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=1e-2),
    "adam": lambda: keras.optimizers.Adam(0.02),
    "adamw": lambda: keras.optimizers.AdamW(0.02, weight_decay=0.1),
    "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.02),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.02),
    "ema": lambda: keras.optimizers.SGD(
        0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3
    ),
    "accumulation": lambda: keras.optimizers.Adam(0.02, gradient_accumulation_steps=3),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)
    ),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)),
}


class Net(keras.Model):
    """A net in float64 with fixed weights; ``inputs()`` makes a batch of what it takes."""

    def __init__(self):
        super().__init__(dtype="float64")
        self.head = keras.layers.Dense(1, dtype="float64")

    def inputs(self, rng):
        return rng.normal(size=(SAMPLES, 5))

    def start(self):
        """Builds the net and gives it weights that depend on nothing else."""
        self(self.inputs(np.random.default_rng(0)))
        rng = np.random.default_rng(1)
        for variable in self.variables:
            if not variable.name.startswith("moving_"):
                variable.assign(rng.normal(size=variable.shape, scale=0.5))
        return self


class ConvNet(Net):
    """A convolution and batch normalisation with its moving averages."""

    def __init__(self, normalization=keras.layers.BatchNormalization):
        super().__init__()
        self.conv = keras.layers.Conv2D(3, 3, dtype="float64")
        self.norm = normalization(dtype="float64")
        self.flatten = keras.layers.Flatten(dtype="float64")

    def inputs(self, rng):
        return rng.normal(3.0, 1.0, size=(SAMPLES, 5, 5, 1))

    def call(self, x, training=False):
        x = keras.ops.tanh(self.norm(self.conv(x), training=training))
        return self.head(self.flatten(x))


class EmbeddingNet(Net):
    """Rows that a batch does not look up have no gradient; ranks look up different ones."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(40, 3, dtype="float64")
        self.flatten = keras.layers.Flatten(dtype="float64")

    def inputs(self, rng):
        return rng.integers(0, 40, size=(SAMPLES, 2)).astype("int32")

    def call(self, x, training=False):
        return self.head(self.flatten(self.embedding(x)))


class TiedNet(Net):
    """One matrix in two places."""

    def __init__(self):
        super().__init__()
        self.shared = keras.layers.Dense(5, "tanh", dtype="float64")

    def call(self, x, training=False):
        x = self.shared(self.shared(x))
        return self.head(keras.ops.matmul(x, keras.ops.transpose(self.shared.kernel)))


class PartlyFrozenNet(Net):
    def __init__(self):
        super().__init__()
        self.frozen = keras.layers.Dense(7, "tanh", dtype="float64", trainable=False)

    def call(self, x, training=False):
        return self.head(self.frozen(x))


class PartlyUnusedNet(Net):
    """``spare`` has no gradient on any rank; weight decay must not touch it, as in one process."""

    def __init__(self):
        super().__init__()
        self.spare = keras.layers.Dense(5, dtype="float64")
        self.spare.build((None, 5))

    def call(self, x, training=False):
        return self.head(x)


class RankZeroNet(Net):
    """``extra`` is used for the samples of rank 0 alone: other ranks have no gradient for it.

    With ``whole`` it sees the whole batch and takes that rank's samples out of it, as one process
    would.
    """

    def __init__(self, whole=False):
        super().__init__()
        self.extra = keras.layers.Dense(5, "tanh", dtype="float64")
        self.extra.build((None, 5))
        self.whole = whole

    def call(self, x, training=False):
        if self.whole:
            mine = (np.arange(SAMPLES) % verbs.size() == 0)[:, None]
            x = x + keras.ops.convert_to_tensor(mine, "float64") * self.extra(x)
        elif verbs.rank() == 0:
            x = x + self.extra(x)
        return self.head(x)


def noisy_net():
    """With statistics of batches and noise, which are each rank's own; in float32."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(7, "tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5, seed=verbs.rank()),
            keras.layers.Dense(1),
        ]
    )
    model.layers[1].moving_mean.assign(np.full(7, verbs.rank(), "float32"))
    return model


PLAIN_NETS = {
    "embedding": EmbeddingNet,
    "tied": TiedNet,
    "frozen": PartlyFrozenNet,
    "unused": PartlyUnusedNet,
}


def batches(net):
    """Global batches: (inputs, targets of shape (SAMPLES, 1))."""
    rng = np.random.default_rng(2)
    return [(net.inputs(rng), rng.normal(size=(SAMPLES, 1))) for _ in range(STEPS)]


def assert_parity(variables, reference, exact=True):
    """Equal bits with one rank if ``exact``, equal within the tolerance otherwise."""
    for found, expected in zip(variables, reference, strict=True):
        found, expected = (np.array(keras.ops.convert_to_numpy(v)) for v in (found, expected))
        if exact and verbs.size() == 1:
            np.testing.assert_array_equal(found, expected)
        else:
            np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
