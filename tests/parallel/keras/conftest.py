"""One Horovod world for all tests of a launch; ``KERAS_BACKEND`` says on which framework."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest

import hvdsync.keras as hvd


@pytest.fixture(scope="session", autouse=True)
def world():
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    else:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture(autouse=True)
def same_seed_on_all_ranks():
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)


@pytest.fixture
def tensorflow_backend():
    if keras.backend.backend() != "tensorflow":
        pytest.skip("a matter of Keras's TensorFlow backend")
