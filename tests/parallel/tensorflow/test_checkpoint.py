"""Checkpoints of TensorFlow on several ranks: variables, modules, and streams of random numbers."""

import keras
import numpy as np
import tensorflow as tf

import hvdsync.tensorflow as hvd


def test_each_rank_goes_on_with_its_own_generators(shared_path):
    tf.random.set_global_generator(tf.random.Generator.from_seed(7 + hvd.rank()))
    own = tf.random.Generator.from_seed(70 + hvd.rank())
    keras.utils.set_random_seed(700 + hvd.rank())
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.5)])

    @tf.function
    def step():
        return (
            tf.random.get_global_generator().normal((2,)),
            own.uniform((2,)),
            model(tf.ones((2, 8)), training=True),
        )

    def draws():
        return [number.numpy().tolist() for number in step()]

    draws()
    state = hvd.RandomState(model, own)
    with hvd.Checkpoint(shared_path, background=True) as checkpoint:
        checkpoint.save(1, random=state)
        expected = [draws() for _ in range(3)]
        assert len({str(other) for other in hvd.allgather_object(expected)}) == hvd.size()
        assert checkpoint.restore(random=state)["step"] == 1
        assert [draws() for _ in range(3)] == expected


def test_a_background_save_holds_variables_and_modules_of_its_moment(shared_path):
    class Module(tf.Module):
        def __init__(self):
            super().__init__()
            self.a = tf.Variable([1.0, 2.0])
            self.b = tf.Variable(3, dtype=tf.int64)

    module, v = Module(), tf.Variable([[4.0]], name="v")
    with hvd.Checkpoint(shared_path, background=True) as checkpoint:
        folder = checkpoint.save(1, module=module, v=v)
        for variable in (module.a, module.b, v):
            variable.assign(variable * 0)
        checkpoint.wait()
        assert checkpoint.restore(module=module, v=v)["step"] == 1
    assert module.a.numpy().tolist() == [1.0, 2.0]
    assert (module.b.numpy(), v.numpy().tolist()) == (3, [[4.0]])
    if hvd.rank() == 0:
        with np.load(folder / "module.npz", allow_pickle=False) as stored:
            assert [stored[key].tolist() for key in stored.files] == [[1.0, 2.0], 3]
