"""What ranks must share in ``fit`` is compared before the first batch; a difference is an error."""

import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from hvdsync.comm.comparison import noted
from hvdsync.errors import RankMismatch
from tests.parallel.keras.helpers import make_model

pytestmark = pytest.mark.usefixtures("several_ranks")


def fitted(batches=2, callbacks=(), epochs=1, **options):
    x = np.ones((4 * batches, 5), np.float32)
    model = make_model()
    model.compile(hvd.distribute(keras.optimizers.SGD(0.1), **options), "mse")
    y = np.zeros((len(x), *model.output_shape[1:]), np.float32)
    model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks))


def average():
    return hvd.callbacks.MetricAverageCallback()


def test_unequal_numbers_of_batches_are_refused_with_both():
    with pytest.raises(RankMismatch, match=r"number of batches.*: ranks? 0.*: 2; rank 1: 3"):
        fitted(batches=2 + (hvd.rank() == 1), callbacks=[average()])


def test_other_callbacks_that_talk_to_other_ranks_are_refused():
    extra = [hvd.callbacks.GuardCallback()] if hvd.rank() == 1 else []
    with pytest.raises(RankMismatch, match=r"callbacks of hvdsync.*rank 1: .*GuardCallback"):
        fitted(callbacks=[average(), *extra])


def test_callbacks_of_keras_may_be_on_one_rank_only():
    own = [keras.callbacks.LambdaCallback()] if hvd.rank() == 0 else []
    fitted(callbacks=[*own, average()])


def test_unequal_epochs_are_refused():
    with pytest.raises(RankMismatch, match=r"epochs: ranks? 0.*: 1; rank 1: 2"):
        fitted(epochs=1 + (hvd.rank() == 1), callbacks=[average()])


def test_other_options_of_distribute_are_refused_when_the_optimizer_is_built():
    with pytest.raises(
        RankMismatch, match=r"gradient_predivide_factor: ranks? 0.*: 1.0; rank 1: 2.0"
    ):
        fitted(gradient_predivide_factor=1.0 + (hvd.rank() == 1))


def test_another_seed_of_the_data_order_is_refused():
    noted()
    hvd.DistributedSampler(10, seed=hvd.rank())
    with pytest.raises(
        RankMismatch, match="data order: rank 0: 10 by seed 0; rank 1: 10 by seed 1"
    ):
        fitted(callbacks=[average()])
