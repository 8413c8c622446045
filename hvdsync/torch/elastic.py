"""Training that goes on while workers come and go: state that is committed and restored.

Horovod's elastic loop drives it; state reaches a new worker without a hidden optimizer step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from horovod.common.elastic import ObjectState, run_fn
from horovod.torch.elastic import ElasticSampler

from hvdsync.comm import verbs, world
from hvdsync.torch.distribute import broadcast_model
from hvdsync.torch.functions import broadcast_optimizer_state, broadcast_state
from hvdsync.torch.ops import hvd

__all__ = ["ElasticSampler", "TorchState", "run"]


class TorchState(ObjectState):
    """What an elastic PyTorch job keeps (stands for Horovod's class of the same name).

    Every keyword becomes an attribute. Models, optimizers and whatever else has a ``state_dict``
    are saved, restored and synchronised by it; other values are copied as Python objects.
    ``commit()`` saves all of it to host memory; after a failure ``restore()`` goes back to the
    last commit, and ``sync()`` gives every worker the state of rank 0.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        self._stateful = {k: v for k, v in kwargs.items() if _has_state(v)}
        self._committed: dict[str, Any] = {}
        plain = {k: v for k, v in kwargs.items() if k not in self._stateful}
        for name, value in self._stateful.items():
            object.__setattr__(self, name, value)
        self._copy_stateful()
        super().__init__(bcast_object=verbs.broadcast_object, get_rank=verbs.rank, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_stateful", {}):
            self._stateful[name] = value
            self._committed[name] = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        """Copy the state to host memory. Nothing travels."""
        self._copy_stateful()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last. Nothing travels."""
        for name, value in self._stateful.items():
            value.load_state_dict(copy.deepcopy(self._committed[name]))
        super().restore()

    def sync(self) -> None:
        """Give every rank the state of rank 0, and save it. Collective."""
        for name, value in self._stateful.items():
            if isinstance(value, torch.nn.Module):
                broadcast_model(value)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value)
            else:
                value.load_state_dict(broadcast_state(value.state_dict(), 0, f"elastic.{name}"))
        self._copy_stateful()
        super().sync()

    def _copy_stateful(self) -> None:
        self._committed = {k: copy.deepcopy(v.state_dict()) for k, v in self._stateful.items()}


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of an elastic training function (stands for Horovod's).

    The function's first argument is a :class:`TorchState`. When a worker is lost the state goes
    back to its last commit; when workers come or go it is synchronised and the function is
    called again. Collectives belong inside the function, not around it.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    # The active communicator asks Horovod for rank and size at each use: it stays as it is.
    hvd.shutdown()
    hvd.init()
    world.renewed()
