"""One process group for all tests of a launch, whichever launcher it is."""

import pytest
import torch

import hvdsync.torch as hvd


@pytest.fixture(scope="session", autouse=True)
def world():
    torch.set_num_threads(1)
    hvd.init(engine="ddp")
    yield
    hvd.shutdown()


@pytest.fixture(autouse=True)
def same_seed_on_all_ranks():
    torch.manual_seed(0)
