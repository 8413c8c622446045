"""One Horovod world for all tests of a launch (``horovodrun -np 2 python -m pytest ...``)."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd


@pytest.fixture(scope="session", autouse=True)
def world():
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    yield
    hvd.shutdown()


@pytest.fixture(autouse=True)
def same_seed_on_all_ranks():
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
