"""State that is each rank's own: gathered from all at a save, given back to each at a restore.

Objects with ``per_rank = True`` go in; one plain file with the state of every rank comes out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdsync.checkpoint import plain
from hvdsync.checkpoint.codec import broadcast_arrays
from hvdsync.comm import trees, verbs, world
from hvdsync.errors import CheckpointError

logger = logging.getLogger(__name__)

FILE = "per_rank.npz"


def is_per_rank(obj: Any) -> bool:
    """Whether ``obj`` asks to be stored from every rank."""
    return bool(getattr(obj, "per_rank", False)) and hasattr(obj, "load_state_dict")


def gather(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The states of the per-rank objects of ``state``, by rank, on every rank. Collective.

    On the wire: one all-gather of the pickled states. Raises :class:`CheckpointError` on every
    rank when one of them fails, or when ranks give different objects.
    """
    mine: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        mine = {name: _copy(obj.state_dict()) for name, obj in state.items() if is_per_rank(obj)}
    except Exception as error:  # the other ranks wait for this one's part
        failure = error
    here = world.current().rank
    message = None if failure is None else f"rank {here}: {failure!r}"
    everyone = verbs.allgather_object((mine, message), "hvdsync.checkpoint.per_rank")
    for _, message in everyone:
        if message is not None:
            raise CheckpointError(
                f"checkpoint: the state of a per-rank object could not be taken: {message}"
            ) from failure
    states = [theirs for theirs, _ in everyone]
    for rank, theirs in enumerate(states):
        if theirs.keys() != states[0].keys():
            raise CheckpointError(
                f"checkpoint: rank {rank} gave the per-rank objects {sorted(theirs)}, and rank 0 "
                f"{sorted(states[0])}; give the same on every rank"
            )
    return states


def write(folder: Path, states: Sequence[Mapping[str, Any]]) -> None:
    """Put the gathered states into one file of ``folder``."""
    plain.write_tree(folder / FILE, list(states), "a per-rank object")


def read(folder: Path) -> list[dict[str, Any]]:
    """The states of all ranks of the run that wrote them."""
    states: list[dict[str, Any]] = plain.read_tree(folder / FILE)
    return states


def deal_out(states: list[dict[str, Any]] | None, names: Sequence[str]) -> dict[str, Any] | None:
    """This rank's states out of those that rank 0 read; None at another world size. Collective."""
    comm = world.current()
    wanted = states and [{name: state[name] for name in names} for state in states]
    wanted = broadcast_arrays(wanted, "hvdsync.checkpoint.per_rank")
    if len(wanted) == comm.size:
        mine: dict[str, Any] = wanted[comm.rank]
        return mine
    if comm.rank == 0:
        logger.warning(
            "the checkpoint holds %s of %d ranks, and there are %d now: no exact answer exists, "
            "and they stay as they are",
            ", ".join(names),
            len(wanted),
            comm.size,
        )
    return None


def _copy(state: Any) -> Any:
    skeleton, arrays = trees.split(state, plain.is_array)
    return trees.join(skeleton, [np.array(array, order="C") for array in arrays])
