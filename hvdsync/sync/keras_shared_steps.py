"""Steps of each rank upon variables that all share: a rule in, what a Keras optimizer follows out.

Written once for both backends; how values come out of variables and into them is below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hvdsync.comm import world
from hvdsync.sync.shared_steps import Arrays, HandOver, SharedSteps
from hvdsync.sync.tensorflow_gradients import variable_of
from hvdsync.sync.update_rules import Asynchronous
from hvdsync.sync.variables import as_array


class SharedVariables(SharedSteps):
    """See :class:`hvdsync.sync.keras_optimizer.LocalTraining`; for :class:`Asynchronous`.

    ``trained`` gives the variables to share, ``share_state`` all ranks the optimizer state of rank
    0. ``statistics`` may be set to further variables, which have their mean when replicas are made
    equal.
    """

    def __init__(
        self,
        rule: Asynchronous,
        hand_over: HandOver,
        trained: Callable[[], list[Any]],
        share_state: Callable[[], None],
    ) -> None:
        super().__init__(rule, hand_over, trained)
        self.statistics: Sequence[Any] = ()
        self._share_state = share_state

    @property
    def is_all_equal(self) -> bool:
        """Whether all state is equal on all ranks now."""
        return self.replicas_equal

    def equal_variables(self) -> list[Any]:
        """None, while each rank is at its own pace."""
        return list(self._parameters()) if self.replicas_equal else []

    def run(self, shared: Callable[[], Any], alone: Callable[[], Any], guard: Any = None) -> None:
        """One step of this rank, and the exchange after it."""
        self.before_step()
        alone()
        self.after_step()

    def _meet(self) -> None:
        for i, variable in enumerate(self.statistics):
            variable.assign(_mean(as_array(variable), f"hvdsync.asynchronous.statistics{i}"))
        self._share_state()

    def state(self) -> dict[str, np.ndarray]:
        """Nothing beyond the variables themselves."""
        return {}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Share, from the next step on, the values that rank 0 has then."""
        self.take_up()


def _mean(array: np.ndarray, name: str) -> np.ndarray:
    comm = world.current()
    total = comm.allreduce(np.array(array, np.float64).reshape(-1), "sum", name)
    return (total / comm.size).reshape(array.shape).astype(array.dtype)


def hand_over_at_once(
    variables: Sequence[Any],
    function: Callable[[Arrays], Arrays],
    condition: Callable[[], bool] | None,
) -> None:
    """The :data:`HandOver` of a backend that computes as it is called."""
    if condition is None or condition():
        arrays = function([as_array(variable) for variable in variables])
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array.copy())


class GraphHandOver:
    """The :data:`HandOver` of TensorFlow, eagerly and within functions."""

    def __init__(self, tf: Any) -> None:
        self._tf = tf

    def __call__(
        self,
        variables: Sequence[Any],
        function: Callable[[Arrays], Arrays],
        condition: Callable[[], bool] | None,
    ) -> None:
        """Read the variables, call, and assign; in the order of the graph."""
        tf = self._tf
        if tf.executing_eagerly():
            hand_over_at_once(variables, function, condition)
            return
        targets = [variable_of(variable) for variable in variables]

        def hand_over() -> Any:
            values = [target.read_value() for target in targets]
            results = tf.numpy_function(
                lambda *arrays: [array.copy() for array in function(list(arrays))],
                values,
                [v.dtype for v in values],
            )
            for target, result in zip(targets, results, strict=True):
                target.assign(tf.ensure_shape(result, target.shape))
            return tf.constant(True)

        if condition is None:
            hand_over()
            return
        is_so = tf.ensure_shape(tf.numpy_function(condition, [], tf.bool), ())
        tf.cond(is_so, hand_over, lambda: tf.constant(True))
