"""Elastic training with TensorFlow: state that survives ranks that die or join.

Stands for ``horovod.tensorflow.elastic``; variables go in, the last committed values come back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from horovod.common.elastic import ObjectState, run_fn
from horovod.common.exceptions import HorovodInternalError

from hvdsync.comm import verbs
from hvdsync.sync.keras_optimizer import build_alone
from hvdsync.sync.variables import VariablesMemory
from hvdsync.tensorflow.functions import broadcast_object, broadcast_variables
from hvdsync.tensorflow.runtime import init, shutdown

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a training function whose first argument is an elastic state.

    When a rank dies, the state goes back to its last commit, Horovod starts anew with the ranks
    that are left or joined, the state is made equal on all, and the function runs again.
    """

    @functools.wraps(func)
    def guarded(state: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(state, *args, **kwargs)
        except (tf.errors.UnknownError, tf.errors.AbortedError) as error:
            if is_lost_rank(error):
                raise HorovodInternalError(error) from error
            raise

    return run_fn(guarded, _reset)


def is_lost_rank(error: tf.errors.OpError) -> bool:
    """Whether a TensorFlow error says that a collective failed, and not the user's own code."""
    return any(mark in error.message for mark in ("Horovod", "horovod", ".bucket", "hvdsync."))


def _reset() -> None:
    shutdown()
    init()


class _VariablesState(ObjectState):
    """Variables and plain attributes with the verbs save, restore and sync."""

    def __init__(self, listed: Callable[[], list[Any]], **kwargs: Any) -> None:
        self._memory = VariablesMemory(listed)
        self._listed_variables = listed
        super().__init__(bcast_object=broadcast_object, get_rank=verbs.rank, **kwargs)

    def save(self) -> None:
        """Copy variables and attributes to memory."""
        self._memory.save()
        super().save()

    def restore(self) -> None:
        """Go back to what was saved last."""
        self._memory.restore()
        super().restore()

    def sync(self) -> None:
        """Give every rank the state of rank 0, and save it."""
        broadcast_variables(self._listed_variables(), root_rank=0)
        self._memory.save()
        super().sync()


class TensorFlowKerasState(_VariablesState):
    """State of a Keras model and its optimizer (stands for Horovod's of the same name).

    ``optimizer`` defaults to the one the model is compiled with; ``backend`` is accepted for
    compatibility; ``kwargs`` become attributes that are saved and synchronised too. Raises
    ``ValueError`` when the model is not built.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not getattr(model, "built", True):
            raise ValueError("Model must be built first. Run `model.build(input_shape)`.")
        self.model = model
        self.optimizer = model.optimizer if optimizer is None else optimizer
        self.backend = backend

        def listed() -> list[Any]:
            variables = getattr(self.optimizer, "variables", [])
            return [*model.variables, *(variables() if callable(variables) else variables)]

        if self.optimizer is not None and getattr(self.optimizer, "built", None) is False:
            build_alone(self.optimizer, model.trainable_variables)
        super().__init__(listed, **kwargs)


class TensorFlowState(_VariablesState):
    """State of a list of ``tf.Variable`` (stands for Horovod's of the same name).

    ``variables`` defaults to TensorFlow 1's global ones; ``session`` is accepted for compatibility.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        self.variables = variables or tf.compat.v1.global_variables()
        self.session = session
        super().__init__(lambda: list(self.variables), **kwargs)
