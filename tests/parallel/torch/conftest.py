"""One Horovod world for all tests of a launch (``horovodrun -np 2 python -m pytest ...``)."""

import os

import pytest
import torch

import hvdsync.torch as hvd


@pytest.fixture(scope="session", autouse=True)
def world():
    torch.set_num_threads(1)
    if os.environ.get("ENGINE") == "ddp":
        hvd.init(engine="ddp")
    else:
        hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


@pytest.fixture(autouse=True)
def same_seed_on_all_ranks():
    torch.manual_seed(0)
