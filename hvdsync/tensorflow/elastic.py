"""Elastic training with TensorFlow: state that survives ranks that die or join.

Stands for ``horovod.tensorflow.elastic``; variables go in, the last committed values come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdsync.sync import elastic
from hvdsync.sync.elastic import VariablesState
from hvdsync.sync.keras_optimizer import build_alone
from hvdsync.tensorflow.runtime import init, shutdown

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a training function whose first argument is an elastic state.

    When a rank dies, the state goes back to its last commit, Horovod starts anew with the ranks
    that are left or joined, the state is made equal on all, and the function runs again.
    """
    return elastic.run(func, _reset, lambda error: elastic.tensorflow_lost_rank(tf, error))


def _reset() -> None:
    shutdown()
    init()


class TensorFlowKerasState(VariablesState):
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


class TensorFlowState(VariablesState):
    """State of a list of ``tf.Variable`` (stands for Horovod's of the same name).

    ``variables`` defaults to TensorFlow 1's global ones; ``session`` is accepted for compatibility.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        self.variables = variables or tf.compat.v1.global_variables()
        self.session = session
        super().__init__(lambda: list(self.variables), **kwargs)
