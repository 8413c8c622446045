"""N ranks fit shards of each batch to the weights of one plain process on the whole batch."""

import keras
import numpy as np
import pytest

import hvdsync.keras as hvd
from tests.parallel.cases import matrix_but
from tests.parallel.keras.helpers import assert_equal_on_all_ranks
from tests.parallel.keras_nets import (
    OPTIMIZERS,
    PLAIN_NETS,
    SAMPLES,
    ConvNet,
    RankZeroNet,
    TiedNet,
    assert_parity,
    batches,
)
from tests.parallel.ranks import shard


@pytest.fixture(autouse=True)
def losses_and_rates_in_float64():
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def fit(model, optimizer, data, **compile_arguments):
    model.compile(optimizer=optimizer, loss="mse", **compile_arguments)
    x, y = (np.concatenate(arrays) for arrays in zip(*data, strict=True))
    model.fit(x, y, batch_size=len(data[0][1]), epochs=2, shuffle=False, verbose=0)


def check(make_net, make_reference, make_optimizer, **compile_arguments):
    reference, plain = make_reference().start(), make_optimizer()
    data = batches(reference)
    fit(reference, plain, data, **compile_arguments)

    model, optimizer = make_net().start(), hvd.distribute(make_optimizer())
    fit(model, optimizer, [shard(*batch) for batch in data], **compile_arguments)
    assert_parity(
        [*model.variables, *optimizer.variables], [*reference.variables, *plain.variables]
    )
    assert_equal_on_all_ranks([*model.variables, *optimizer.variables])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_reaches_the_weights_of_one_process(kind):
    check(TiedNet, TiedNet, OPTIMIZERS[kind])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("net", PLAIN_NETS)
def test_unusual_models_reach_the_weights_of_one_process(net):
    check(PLAIN_NETS[net], PLAIN_NETS[net], OPTIMIZERS["sgd"])


def test_batch_norm_over_all_ranks_reaches_the_weights_and_averages_of_one_process():
    # Not Adam: it would blow up the rounding of the bias whose gradient normalisation makes 0.
    check(lambda: ConvNet(hvd.SyncBatchNormalization), ConvNet, OPTIMIZERS["sgd"])


def test_a_layer_that_rank_zero_alone_uses_gets_its_gradient_on_all_ranks():
    check(RankZeroNet, lambda: RankZeroNet(whole=True), OPTIMIZERS["sgd"])


@pytest.mark.usefixtures("tensorflow_backend")
def test_eager_steps_do_so_too():
    check(RankZeroNet, lambda: RankZeroNet(whole=True), OPTIMIZERS["adam"], run_eagerly=True)


@pytest.mark.parametrize("kind", matrix_but(["adam"], OPTIMIZERS))
def test_accumulated_batches_are_one_large_batch(kind):
    """Two passes of half the samples make one step: its count and Adam's correction too."""
    reference, plain = TiedNet().start(), OPTIMIZERS[kind]()
    data = batches(reference)
    fit(reference, plain, data)

    # Each rank's part of a batch, in two passes of which each is averaged.
    shards = [shard(*batch) for batch in data]
    half = SAMPLES // hvd.size() // 2
    if half * 2 * hvd.size() != SAMPLES:
        pytest.skip("the batch does not divide by two passes on each rank")
    passes = [(x[i : i + half], y[i : i + half]) for x, y in shards for i in (0, half)]
    model, optimizer = TiedNet().start(), hvd.distribute(OPTIMIZERS[kind](), accumulate=2)
    fit(model, optimizer, passes)
    assert_parity(model.variables, reference.variables, exact=False)
    assert int(optimizer.iterations) == int(plain.iterations)
    assert_equal_on_all_ranks([*model.variables, *optimizer.variables])
