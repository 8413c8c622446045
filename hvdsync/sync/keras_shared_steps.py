"""Steps of each rank upon variables that all share: a rule in, what a Keras optimizer follows out.

Written once for both backends; how values come out of variables and into them is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from hvdsync.comm import world
from hvdsync.guard.watch import watch
from hvdsync.sync.asynchronous import SharedParameters
from hvdsync.sync.tensorflow_gradients import variable_of
from hvdsync.sync.update_rules import Asynchronous
from hvdsync.sync.variables import as_array

Arrays: TypeAlias = list[np.ndarray]
# Gives variables what a function makes of their values, if the condition is true.
HandOver: TypeAlias = Callable[
    [Sequence[Any], Callable[[Arrays], Arrays], Callable[[], bool] | None], None
]


class SharedSteps:
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
        self.statistics: Sequence[Any] = ()
        self.shared: SharedParameters | None = None
        self.replicas_equal = True
        self._rule = rule
        self._hand_over = hand_over
        self._trained = trained
        self._share_state = share_state
        self._is_outdated = False

    @property
    def is_all_equal(self) -> bool:
        """Whether all state is equal on all ranks now."""
        return self.replicas_equal

    def equal_variables(self) -> list[Any]:
        """None, while each rank is at its own pace."""
        return self._trained() if self.replicas_equal else []

    @property
    def waited_seconds(self) -> float:
        """Seconds that exchanges took so far."""
        return 0.0 if self.shared is None else self.shared.waited_seconds

    def run(self, shared: Callable[[], Any], alone: Callable[[], Any], guard: Any = None) -> None:
        """One step of this rank, and the exchange after it."""
        variables = self._trained()
        self._hand_over(variables, self._begin, self._is_to_begin)
        alone()
        self._hand_over(variables, self._exchange, None)

    def _is_to_begin(self) -> bool:
        return self.shared is None or self._is_outdated

    def _begin(self, arrays: Arrays) -> Arrays:
        if self.shared is None:
            # Halves are shared in single precision: what others add is not rounded away.
            wide = [a if a.dtype == np.float64 else a.astype(np.float32) for a in arrays]
            self.shared = SharedParameters(
                wide, staleness=self._rule.staleness, wait_limit=watch.wait_limit()
            )
        else:
            self._put(arrays)
            self.shared.reset()
        self._is_outdated = False
        return self._values_like(arrays)

    def _exchange(self, arrays: Arrays) -> Arrays:
        assert self.shared is not None
        self._put(arrays)
        self.shared.exchange()
        self.replicas_equal = False
        return self._values_like(arrays)

    def _put(self, arrays: Arrays) -> None:
        assert self.shared is not None
        for values, array in zip(self.shared.values, arrays, strict=True):
            values[...] = array

    def _values_like(self, arrays: Arrays) -> Arrays:
        assert self.shared is not None
        # Copies: a framework may keep what it is given.
        return [v.astype(a.dtype) for v, a in zip(self.shared.values, arrays, strict=True)]

    def synchronize_replicas(self) -> None:
        """Make all state equal on all ranks; collective, whatever steps each has made."""
        if self.shared is None or self._is_outdated:
            return  # all have what they were given, and no step has been made from there
        variables = self._trained()
        arrays = [as_array(variable) for variable in variables]
        self._put(arrays)
        moved = self.shared.agree()
        for variable, array in zip(variables, self._values_like(arrays), strict=True):
            variable.assign(array)
        if moved:
            for i, variable in enumerate(self.statistics):
                variable.assign(_mean(as_array(variable), f"hvdsync.asynchronous.statistics{i}"))
            self._share_state()
        self.replicas_equal = True

    def state(self) -> dict[str, np.ndarray]:
        """Nothing beyond the variables themselves."""
        return {}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Share, from the next step on, the values that rank 0 has then."""
        self._is_outdated = self.shared is not None
        self.replicas_equal = True


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
            variable.assign(array)


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
        targets = [variable_of(variable) for variable in variables]

        def hand_over() -> Any:
            values = [target.read_value() for target in targets]
            results = tf.numpy_function(
                lambda *arrays: function(list(arrays)), values, [v.dtype for v in values]
            )
            # Eagerly, the only result comes by itself.
            for target, result in zip(targets, tf.nest.flatten(results), strict=True):
                target.assign(tf.ensure_shape(result, target.shape))
            return tf.constant(True)

        if condition is None:
            hand_over()
            return
        is_so = tf.ensure_shape(tf.numpy_function(condition, [], tf.bool), ())
        tf.cond(is_so, hand_over, lambda: tf.constant(True))
