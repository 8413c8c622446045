"""A Keras optimizer that reduces gradients before it applies them: a plain optimizer goes in.

Written once for both backends; Keras and a reducer of the backend's gradients are handed in.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from hvdsync.errors import HvdsyncError
from hvdsync.sync.keras_disguise import saved_as

logger = logging.getLogger(__name__)


class Reducer(Protocol):
    """What an optimizer needs of a backend: see ``hvdsync.sync.tensorflow_reducer``."""

    @property
    def active(self) -> bool:
        """Whether more than one rank takes part."""

    @property
    def waited_seconds(self) -> float:
        """Seconds of communication that no computation hid."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has given to collectives."""

    def reduce(
        self,
        gradients: Sequence[Any],
        sources: Sequence[Any],
        *,
        local: Any = (),
        scale_local: bool = True,
    ) -> list[Any]:
        """Gradients reduced over ranks, in the given order."""

    def key(self, variable: Any) -> Hashable:
        """Identity of a variable."""

    def silent(self) -> AbstractContextManager[None]:
        """Context in which nothing travels."""

    @staticmethod
    def outside_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, such that a compiler of whole steps leaves it as it is."""


class LocalTraining(Protocol):
    """Steps of each rank alone: see ``hvdsync.sync.tensorflow_local_steps``."""

    statistics: Sequence[Any]

    def run(self, shared: Callable[[], Any], alone: Callable[[], Any], guard: Any = None) -> None:
        """One step, of all ranks or of this one, and the meetings that are due."""

    @property
    def is_all_equal(self) -> bool:
        """Whether all state is equal on all ranks now."""

    @property
    def replicas_equal(self) -> bool:
        """Whether variables are equal on all ranks now."""

    def equal_variables(self) -> list[Any]:
        """The variables that are equal on all ranks now."""

    def synchronize_replicas(self) -> None:
        """Make all state equal on all ranks."""

    def state(self) -> dict[str, np.ndarray]:
        """What the rule remembers, by name."""

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Take up what :meth:`state` gave; an empty one begins anew."""


class Accumulation(Protocol):
    """Several backward passes per step: see ``hvdsync.sync.accumulation``."""

    def apply(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        update: Callable[[Sequence[Any]], None],
    ) -> None:
        """Add gradients up; call ``update`` with the sums once per step."""


class Verdict(Protocol):
    """Judges gradients before each update: see ``hvdsync.guard.tensorflow_nonfinite``."""

    guard: Any

    def run(
        self,
        optimizer: Any,
        sharing: Sharing,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        update: Callable[[Sequence[Any]], Any],
    ) -> None:
        """Reduce gradients, and call ``update`` with them unless it is not to be made."""


class Sharing:
    """What a distributed optimizer holds besides the optimizer's own state.

    ``before_build(optimizer, variables)`` is called when the optimizer gets to know its variables,
    before it makes slots from them. ``verdict`` is a guard's, or None; without
    one, ``verdict_of_fit`` is that of a callback's guard. ``local_steps`` may be set to what has
    each rank take steps alone.
    """

    def __init__(
        self,
        reducer: Reducer,
        accumulation: Accumulation | None = None,
        scale_local: bool = True,
        before_build: Callable[[Any, Sequence[Any]], None] | None = None,
        verdict: Verdict | None = None,
    ) -> None:
        self.reducer = reducer
        self.accumulation = accumulation
        self.scale_local = scale_local
        self.before_build = before_build
        self.verdict = verdict
        self.verdict_of_fit: Verdict | None = None
        self.local_steps: LocalTraining | None = None
        self.local: set[Hashable] = set()

    def meet(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Call ``before_build``, once."""
        told, self.before_build = self.before_build, None
        if told is not None:
            told(optimizer, variables)

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Gradients as the optimizer is to see them."""
        return self.reducer.reduce(
            gradients, variables, local=self.local, scale_local=self.scale_local
        )


def distribute_optimizer(keras: ModuleType, optimizer: Any, sharing: Sharing) -> Any:
    """The same optimizer, with gradients reduced by ``sharing`` before they are applied.

    The new object has the very state of the given one: variables, slots, schedules and
    hyper-parameters; a change of either is seen by both. It saves as the class it wraps, so that
    a saved model loads with Keras alone. With one rank it is bit for bit the plain optimizer.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"expected a keras.optimizers.Optimizer, found {type(optimizer).__name__}")
    if sharing_of(optimizer) is not None:
        raise ValueError(f"{type(optimizer).__name__}: this optimizer is distributed already")
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None and sharing_of(inner) is not None:
        raise ValueError(
            "a LossScaleOptimizer around a distributed optimizer; wrap the plain one: "
            "DistributedOptimizer(LossScaleOptimizer(optimizer))"
        )
    base: Any = type(optimizer)
    distributed: Any = object.__new__(_distributed_class(base, sharing.reducer.outside_compiler))
    # Shared on purpose, not copied: Keras compiles, builds and schedules through either object.
    object.__setattr__(distributed, "__dict__", optimizer.__dict__)
    object.__setattr__(distributed, "_sharing", sharing)
    return distributed


def with_loss_scaling(keras: ModuleType, optimizer: Any) -> Any:
    """The optimizer, inside a ``LossScaleOptimizer`` where ``compile`` would put it into one.

    With the global policy ``mixed_float16`` Keras wraps whatever ``compile`` is given. Put around
    a distributed optimizer, each rank would judge its own gradients; put inside, all ranks judge
    the reduced ones, and come to one verdict.
    """
    scaler = keras.optimizers.LossScaleOptimizer
    if (
        keras.config.dtype_policy().name != "mixed_float16"
        or not isinstance(optimizer, keras.optimizers.Optimizer)
        or isinstance(optimizer, scaler)
        or sharing_of(optimizer) is not None
    ):
        return optimizer
    logger.info("mixed_float16: the optimizer is given a dynamic loss scale, the same on all ranks")
    return scaler(optimizer, name="loss_scale_optimizer")


def lift_loss_scaling(keras: ModuleType, optimizer: Any) -> Any:
    """A ``LossScaleOptimizer`` around a distributed optimizer, turned inside out; others as given.

    State is shared with the objects given. Every rank then comes to one verdict on each step.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    sharing = None if inner is None else sharing_of(inner)
    if sharing is None or sharing_of(optimizer) is not None:
        return optimizer
    plain: Any = object.__new__(type(inner).__bases__[0])
    object.__setattr__(plain, "__dict__", inner.__dict__)
    optimizer.__dict__["inner_optimizer"] = plain
    return distribute_optimizer(keras, optimizer, sharing)


def build_alone(optimizer: Any, variables: Sequence[Any]) -> None:
    """Make the optimizer's slots without telling other ranks, which may not be doing so now."""
    sharing = sharing_of(optimizer)
    if sharing is None:
        optimizer.build(variables)
        return
    told, sharing.before_build = sharing.before_build, None
    try:
        optimizer.build(variables)
    finally:
        sharing.before_build = told


def sharing_of(optimizer: Any) -> Sharing | None:
    """What makes this optimizer distributed, or None when it is a plain one."""
    return getattr(optimizer, "_sharing", None)


@functools.cache
def _distributed_class(base: Any, outside_compiler: Callable[..., Any]) -> Any:
    """A subclass of an optimizer's class that reduces in ``apply``, where both backends arrive."""

    class Distributed(base):  # type: ignore[misc]
        __slots__ = ("_sharing",)

        __class__ = saved_as(base)

        def build(self, variables: Any) -> Any:
            if not self.built:
                self._sharing.meet(self, variables)
            return base.build(self, variables)

        @outside_compiler
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            if trainable_variables is not None and not self.built:
                # Ranks with other options would not even reduce alike.
                self._sharing.meet(self, list(trainable_variables))
            return _apply(base, self, grads, trainable_variables)

        def register_local_var(self, var: Any) -> None:
            """Keep this variable's gradient to its rank; it is never reduced."""
            self._sharing.local.add(self._sharing.reducer.key(var))

        @property
        def replicas_equal(self) -> bool:
            """Whether variables are equal on all ranks now, which local steps leave them not to be.

            The same on all ranks; nothing travels.
            """
            steps = self._sharing.local_steps
            return steps is None or steps.replicas_equal

        def synchronize_replicas(self) -> None:
            """Make all state equal on all ranks, where local steps left it not to be.

            An early meeting of what has not just met; then all ranks get the optimizer state of
            rank 0. To be called before evaluation, outside of functions; ``Checkpoint.save`` does
            so itself. Collective, and nothing travels where gradients are averaged.
            """
            if self._sharing.local_steps is not None:
                self._sharing.local_steps.synchronize_replicas()

        @property
        def waited_seconds(self) -> float:
            """Seconds of communication that no computation hid, over all steps."""
            own = getattr(self._sharing.local_steps, "waited_seconds", 0.0)
            return self._sharing.reducer.waited_seconds + own

        @property
        def sent_bytes(self) -> int:
            """Bytes of gradients, or of what stands for them, that this rank has sent so far."""
            return self._sharing.reducer.sent_bytes

    Distributed.__name__ = f"Distributed{base.__name__}"
    Distributed.__qualname__ = Distributed.__name__
    return Distributed


# Of a compiler's own wrappers, between the caller of ``apply`` and this module.
_FRAMES_BETWEEN = 6


def _is_called_by_a_loss_scaler(optimizer: Any) -> bool:
    """Whether a ``LossScaleOptimizer`` around this optimizer calls ``apply``.

    It tells the inner optimizer nothing that could be seen otherwise.
    """
    frame = sys._getframe(2)
    for _ in range(_FRAMES_BETWEEN):
        if getattr(frame.f_locals.get("self"), "inner_optimizer", None) is optimizer:
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False


def _apply(base: Any, optimizer: Any, grads: Any, trainable_variables: Any) -> Any:
    sharing: Sharing = optimizer._sharing
    grads = list(grads)
    if trainable_variables is not None:
        trainable_variables = list(trainable_variables)
    verdict = sharing.verdict or sharing.verdict_of_fit
    if getattr(optimizer, "inner_optimizer", None) is not None:
        verdict = None  # a loss scaler judges the reduced gradients itself, and makes use of it
    steps = sharing.local_steps
    passes_on = sharing.accumulation is None and not sharing.reducer.active and steps is None
    if passes_on and (verdict is None or not grads):
        return base.apply(optimizer, grads, trainable_variables)
    if not grads:
        raise HvdsyncError(
            f"{type(optimizer).__name__}: a step without gradients reduces nothing, and replicas "
            "would drift apart unseen; give it the gradients of the variables that are trained, "
            "and leave the step out where there are none"
        )
    if sharing.reducer.active and _is_called_by_a_loss_scaler(optimizer):
        raise HvdsyncError(
            "a LossScaleOptimizer was put around a distributed optimizer: each rank would decide "
            "alone whether a step is skipped. Distribute the outer one instead: "
            "hvd.distribute(keras.optimizers.LossScaleOptimizer(optimizer))"
        )
    if trainable_variables is None:
        variables = list(optimizer._trainable_variables)
    else:
        variables = trainable_variables

    def apply(reduced: Sequence[Any]) -> None:
        base.apply(optimizer, reduced, trainable_variables)

    def shared(gradients: Sequence[Any]) -> None:
        if verdict is None:
            apply(sharing.reduce(gradients, variables))
        else:
            verdict.run(optimizer, sharing, gradients, variables, apply)

    def alone(gradients: Sequence[Any]) -> None:
        with sharing.reducer.silent():
            shared(gradients)

    def update(gradients: Sequence[Any]) -> None:
        if steps is None:
            shared(gradients)
            return
        guard = None if verdict is None else verdict.guard
        steps.run(lambda: shared(gradients), lambda: alone(gradients), guard)

    branches = sharing.accumulation is not None or verdict is not None or steps is not None
    if not optimizer.built and branches:
        optimizer.build(variables)  # its variables cannot be made inside a branch
    if sharing.accumulation is None:
        return update(grads)
    sharing.accumulation.apply(grads, variables, update)
    return None
