"""Steps that each rank takes alone on TensorFlow variables, and the meetings between them.

Works in eager mode and inside ``tf.function``; TensorFlow and Horovod are handed in.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from hvdsync.comm import failures
from hvdsync.guard.guard import Guard
from hvdsync.guard.tensorflow_nonfinite import judge_meeting
from hvdsync.sync.local_steps import LocalSteps, require_equal_steps
from hvdsync.sync.tensorflow_gradients import checksum_of, variable_of
from hvdsync.sync.tensorflow_reducer import GraphReducer
from hvdsync.sync.update_rules import DiLoCo, LocalRule, cut


class GraphLocalSteps(LocalSteps):
    """What a local rule adds to one Keras optimizer: a count of steps, meetings, and their state.

    ``variables`` gives what the optimizer trains, ``share_state`` gives all ranks the optimizer
    state of rank 0. ``statistics`` may be set to further variables, which have their mean with the
    last fragment; before a graph is made.
    """

    def __init__(
        self,
        tf: ModuleType,
        rule: LocalRule,
        reducer: GraphReducer,
        variables: Callable[[], Sequence[Any]],
        share_state: Callable[[], None],
    ) -> None:
        super().__init__(rule)
        self.statistics: Sequence[Any] = ()
        self._tf = tf
        self._reducer = reducer
        self._outer = rule if isinstance(rule, DiLoCo) else None
        self._list = variables
        self._share = share_state
        self._guard: Guard | None = None
        self._memory: _Memory | None = None
        self._eager: dict[tuple[int, int], Callable[[], Any]] = {}

    @property
    def steps(self) -> int:
        return int(self._remembered().steps.numpy()) if self._is_built() else 0

    @property
    def parts(self) -> int:
        return len(self._remembered().runs) if self._is_built() else 0

    def equal_variables(self) -> list[Any]:
        """The variables that are equal on all ranks now."""
        return [variable for i in self.met() for variable in self._part(i)]

    def run(
        self,
        shared: Callable[[], Any],
        alone: Callable[[], Any],
        guard: Guard | None = None,
    ) -> None:
        """One step: ``shared`` in the warm-up, then ``alone``; and the meetings that are due.

        ``guard`` judges what comes of them.
        """
        tf, memory = self._tf, self._remembered()
        self._guard = guard
        step = memory.steps.read_value() + 1
        is_local = step > self.rule.warmup_steps

        if self._outer is not None:
            due = tf.logical_and(is_local, tf.equal(memory.has_anchors, 0))
            self._when(due, memory.take_anchors)
        if self.rule.warmup_steps:
            self._when(is_local, alone, shared)
        else:
            alone()
        memory.steps.assign(step)
        for i in range(self.parts):
            due = tf.logical_and(is_local, self.rule.is_due(step, i))
            self._when(due, functools.partial(self._meet_part, i))

    def _when(
        self,
        condition: Any,
        action: Callable[[], Any],
        otherwise: Callable[[], Any] = lambda: None,
    ) -> None:
        def done(action: Callable[[], Any]) -> Any:
            action()
            return self._tf.constant(True)

        self._tf.cond(condition, lambda: done(action), lambda: done(otherwise))

    def _meet(self, which: Sequence[int]) -> None:
        for i in which:
            self._meet_part(i)

    def _share_state(self) -> None:
        self._share()

    def _meet_part(self, i: int) -> None:
        if not self._tf.executing_eagerly():
            self._meet_in_graph(i)
            return
        # In eager mode one op waits for the one before it; a function runs them all at once.
        key = i, id(self._guard)
        if key not in self._eager:
            self._eager[key] = self._tf.function(lambda: self._meet_in_graph(i), autograph=False)
        with failures.explained():
            self._eager[key]()

    def _meet_in_graph(self, i: int) -> None:
        if self._outer is None and not self._reducer.active:
            return
        tf, memory = self._tf, self._remembered()
        variables, trained = self._part(i), memory.runs[i]
        label = f"{checksum_of(variables)}.meeting{i}"
        own = [variable_of(variable).read_value() for variable in variables]
        sent = list(own)
        if self._outer is not None:
            for p, k in enumerate(trained):
                sent[p] = memory.anchors[k] - own[p]
        with tf.control_dependencies([self._refuse_different_steps(label)]):
            met = self._reducer.average(sent, variables, label)

        def use() -> None:
            values = list(met)
            if self._outer is not None:
                for p, k in enumerate(trained):
                    values[p], momentum = self._outer.outer_step(
                        memory.anchors[k], memory.momenta[k], met[p]
                    )
                    memory.momenta[k].assign(momentum)
                    memory.anchors[k].assign(values[p])
            for variable, value in zip(variables, values, strict=True):
                variable_of(variable).assign(value)

        if self._guard is None:
            use()
            return
        step = memory.steps.read_value()
        is_good = judge_meeting(tf, self._guard, self._reducer, label, variables, own, met, step)
        self._when(is_good, use)

    def _refuse_different_steps(self, label: str) -> Any:
        tf, steps = self._tf, self._remembered().steps
        if not self._reducer.active:
            return tf.no_op()
        everyone = self._reducer.gather(steps.read_value()[None], f"{label}.steps")

        def refuse(counts: np.ndarray) -> np.ndarray:
            require_equal_steps(counts.tolist())
            return np.array(True)

        return tf.numpy_function(refuse, [everyone], tf.bool)

    def _part(self, i: int) -> list[Any]:
        memory = self._remembered()
        statistics = self.statistics if i == self.parts - 1 else ()
        return [*(memory.variables[k] for k in memory.runs[i]), *statistics]

    def _is_built(self) -> bool:
        return self._memory is not None or bool(self._list())

    def _remembered(self) -> _Memory:
        if self._memory is None:
            with self._tf.init_scope():
                self._memory = _Memory(self._tf, self.rule, list(self._list()))
        return self._memory

    def state(self) -> dict[str, np.ndarray]:
        """The number of steps; once there are anchors, anchor and momentum of each variable."""
        if not self._is_built():
            return {}
        memory = self._remembered()
        named = memory.outer() if int(memory.has_anchors.numpy()) else {}
        arrays = {name: variable.numpy() for name, variable in named.items()}
        return {"steps": memory.steps.numpy(), **arrays}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Take up a :meth:`state`, also of another rule or backend; an empty one begins anew."""
        memory = self._remembered()
        memory.steps.assign(state.get("steps", 0))
        outer = memory.outer()
        has_anchors = bool(outer) and all(name in state for name in outer)
        memory.has_anchors.assign(int(has_anchors))
        for name, variable in outer.items():
            variable.assign(state[name] if has_anchors else np.zeros(variable.shape))
        self._taken_up()


class _Memory:
    """The variables of a rule, for those that an optimizer trains."""

    def __init__(self, tf: ModuleType, rule: LocalRule, variables: list[Any]) -> None:
        def make(like: Any) -> Any:
            return tf.Variable(tf.zeros(like.shape, like.dtype), trainable=False)

        self.variables = variables
        sizes = [v.shape.num_elements() * v.dtype.size for v in map(variable_of, variables)]
        self.runs = cut(sizes, rule.fragments)
        self.steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.has_anchors = tf.Variable(0, dtype=tf.int64, trainable=False)
        outer = [variable_of(v) for v in variables] if rule.has_outer_optimizer else []
        self.anchors = [make(v) for v in outer]
        self.momenta = [make(v) for v in outer]

    def take_anchors(self) -> None:
        for anchor, variable in zip(self.anchors, self.variables, strict=True):
            anchor.assign(variable_of(variable).read_value())
        self.has_anchors.assign(1)

    def outer(self) -> dict[str, Any]:
        """Anchors and momenta by name."""
        anchors = {f"anchor.{i}": v for i, v in enumerate(self.anchors)}
        return {**anchors, **{f"momentum.{i}": v for i, v in enumerate(self.momenta)}}
