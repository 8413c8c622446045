"""Ranks that give one name different tensors: the error says at once which, what, and who."""

import pytest
import tensorflow as tf

import hvdsync.tensorflow as hvd
from hvdsync.errors import RankMismatch

pytestmark = pytest.mark.usefixtures("several_ranks")


def mismatched(name):
    return hvd.allreduce(tf.ones([3 if hvd.rank() == 1 else 2]), name=name)


def values():
    ranks = [rank for rank in range(hvd.size()) if rank != 1]
    others = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return f"shape [2] on {others}, but [3] on rank 1"


def test_every_rank_is_told_the_name_the_values_and_the_ranks():
    with pytest.raises(RankMismatch) as caught:
        mismatched("eager")
    # Outside of graphs TensorFlow does not tell Horovod the names of operations.
    assert str(caught.value).startswith(
        f"rank {hvd.rank()}: ranks disagree about the tensor 'HorovodAllreduce': {values()};"
    )
    # Scripts written for Horovod catch this.
    assert isinstance(caught.value, tf.errors.FailedPreconditionError)
    # Nothing is broken: the next one goes through.
    assert (
        hvd.allreduce(tf.ones([2]), op=hvd.Sum, name="eager").numpy().tolist() == [hvd.size()] * 2
    )


def test_a_graph_s_error_says_it_too():
    with pytest.raises(tf.errors.FailedPreconditionError) as caught:
        tf.function(lambda: mismatched("graph"))()
    assert f"Mismatched tensor 'graph': {values()}." in str(caught.value)


def test_gradients_of_other_shapes_are_told_by_the_tape():
    variable = tf.Variable(tf.ones([3 if hvd.rank() == 1 else 2]))
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(variable * variable)
    with pytest.raises(RankMismatch, match="the tensors of 'DistributedGradientTape") as caught:
        tape.gradient(loss, [variable])
    assert "tensor 0: " in str(caught.value)
    assert "rank 1: shape [3]" in str(caught.value)
