"""The communicator of this process: set by a front door's ``init``, read by every verb.

One process belongs to one world; with no ``init`` and no launcher that is a world of one.
"""

from __future__ import annotations

from hvdsync.comm.communicator import Communicator, SingleProcess
from hvdsync.comm.launch import detect
from hvdsync.errors import LaunchError

_active: Communicator | None = None
_generation = 0


def current() -> Communicator:
    """The active communicator, or a world of one before any ``init``.

    Raises :class:`LaunchError` when a launcher started several ranks and none was initialised:
    each of them would otherwise believe that it is alone.
    """
    if _active is not None:
        return _active
    launch = detect()
    if launch is not None and launch.size > 1:
        raise LaunchError(
            f"{launch.launcher} started this process as rank {launch.rank} of {launch.size}, "
            "but hvdsync is not initialised; call init() of hvdsync.torch, hvdsync.tensorflow "
            "or hvdsync.keras first"
        )
    return SingleProcess()


def is_active() -> bool:
    """Whether a front door has been initialised in this process."""
    return _active is not None


def activate(communicator: Communicator) -> None:
    """Make ``communicator`` the one that every verb uses."""
    global _active
    _active = communicator
    renewed()


def renewed() -> None:
    """The ranks have met anew: some may be new, and know nothing of what the others did before."""
    global _generation
    _generation += 1


def generation() -> int:
    """A number that changes whenever the ranks meet anew; of this process alone."""
    return _generation


def deactivate() -> None:
    """Forget the active communicator; the next ``init`` sets a new one."""
    global _active
    _active = None
