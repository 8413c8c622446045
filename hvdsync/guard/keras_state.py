"""What replicas of a Keras model share: model and optimizer in, variables or entries out.

Written once for TensorFlow and for Keras on both backends; needs no framework of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdsync.guard import replicas
from hvdsync.guard.fingerprints import Entry, array_entry, kind_of, plain_entry
from hvdsync.sync.keras_optimizer import sharing_of
from hvdsync.sync.tensorflow_gradients import name_of
from hvdsync.sync.variables import broadcast_through_host


def spread(root: int, model: Any, optimizer: Any) -> None:
    """Give every rank the shared variables of rank ``root``.

    Raises :class:`RankMismatch` on every rank when shapes or dtypes differ.
    """
    of_model, of_optimizer = equal_variables(model, optimizer)
    broadcast_through_host([*of_model, *of_optimizer], root)


def list_entries(model: Any, optimizer: Any) -> list[Entry]:
    """The variables of :func:`equal_variables` and the learning rate, found by their positions.

    Not by their names: Keras counts layers up, on a rank that made another model before too.
    """
    parts = equal_variables(model, optimizer)
    entries = [*entries_of("model", parts[0]), *entries_of("optimizer", parts[1])]
    optimizer = _optimizer_of(model, optimizer)
    rate = getattr(optimizer, "learning_rate", None)
    steps = _local_steps_of(optimizer)
    if steps is not None and not steps.is_all_equal:
        return entries
    if rate is not None and not any(rate is variable for variable in parts[1]):
        # Of a schedule, which has no variable.
        entries.append(plain_entry("optimizer.learning_rate", float(_value(rate))))
    return entries


def refuse_between_meetings(model: Any, optimizer: Any) -> None:
    """Raise ``HvdsyncError`` where replicas are not meant to be equal, since ranks train alone."""
    steps = _local_steps_of(_optimizer_of(model, optimizer))
    if steps is not None and not steps.replicas_equal:
        raise replicas.between_meetings()


def is_nothing_equal(model: Any, optimizer: Any) -> bool:
    """Whether no variable is meant to be equal on all ranks now."""
    steps = _local_steps_of(_optimizer_of(model, optimizer))
    return steps is not None and not steps.is_all_equal and not steps.equal_variables()


def equal_variables(model: Any, optimizer: Any) -> tuple[list[Any], list[Any]]:
    """As :func:`shared_variables`; where ranks take steps alone, those that have met just now."""
    steps = _local_steps_of(_optimizer_of(model, optimizer))
    if steps is None or steps.is_all_equal:
        return shared_variables(model, optimizer)
    return steps.equal_variables(), []


def _local_steps_of(optimizer: Any) -> Any:
    sharing = None if optimizer is None else sharing_of(optimizer)
    return None if sharing is None else sharing.local_steps


def entries_of(part: str, variables: Sequence[Any]) -> list[Entry]:
    """The entries of variables, found by their positions in this part of the state."""
    return [
        array_entry(f"{part}.{i}", name_of(variable), kind_of(variable), _reader(variable))
        for i, variable in enumerate(variables)
    ]


def shared_variables(model: Any, optimizer: Any) -> tuple[list[Any], list[Any]]:
    """(the model's variables, the optimizer's), without those that are each rank's own.

    Of a Keras model its weights, not its metrics and seed generators. Of both without the
    variables that were registered as local with the optimizer, and their slots.
    """
    optimizer = _optimizer_of(model, optimizer)
    variables = list(_variables_of(model))
    slots = [] if optimizer is None else optimizer.variables
    slots = list(slots() if callable(slots) else slots)
    sharing = sharing_of(optimizer) if optimizer is not None else None
    if sharing is not None and sharing.local:
        shared = [v for v in variables if sharing.reducer.key(v) not in sharing.local]
        prefixes = {_slot_prefix(v) for v in variables}
        own = prefixes - {_slot_prefix(v) for v in shared}
        slots = [slot for slot in slots if _prefix_of(slot, prefixes) not in own]
        variables = shared
    return variables, slots


def _slot_prefix(variable: Any) -> str:
    """What Keras begins the names of a variable's slots with."""
    return f"{name_of(variable).replace('/', '_')}_"


def _prefix_of(slot: Any, prefixes: set[str]) -> str | None:
    # The longest: "a_kernel_" begins the names of slots of "a/kernel_b", too.
    return max((p for p in prefixes if slot.name.startswith(p)), key=len, default=None)


def _optimizer_of(model: Any, optimizer: Any) -> Any:
    return optimizer if optimizer is not None else getattr(model, "optimizer", None)


def _variables_of(model: Any) -> Iterator[Any]:
    if isinstance(model, list | tuple):
        for part in model:
            yield from _variables_of(part)
    elif hasattr(model, "assign") and hasattr(model, "shape"):
        yield model
    else:
        weights: Sequence[Any] | None = getattr(model, "weights", None)
        yield from model.variables if weights is None else weights


def _reader(variable: Any) -> Callable[[], np.ndarray]:
    return lambda: _value(variable)


def _value(variable: Any) -> np.ndarray:
    # Asked directly: through np.asarray NumPy 2 warns of the keyword `copy` that Keras lacks.
    return variable.__array__() if hasattr(variable, "__array__") else np.asarray(variable)
