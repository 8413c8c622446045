"""The engine that ``distribute`` is asked for, in a framework that offers it or not."""

import pytest

from hvdsync.sync.options import check_engine


def test_what_is_offered_is_accepted():
    check_engine("horovod")
    check_engine("ddp", offered=("horovod", "ddp"))


def test_another_engine_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"'ddp'; expected 'horovod'; Distributed.*PyTorch's own"):
        check_engine("ddp")
    with pytest.raises(ValueError, match="'nccl'; expected 'horovod' or 'ddp'$"):
        check_engine("nccl", offered=("horovod", "ddp"))
