"""The random streams of one rank: generators in, their exact states as plain values out, and back.

What a framework adds to Python's and NumPy's is handed in by the front doors.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdsync.errors import CheckpointError

logger = logging.getLogger(__name__)

_VERSION = 1


@dataclass(frozen=True)
class Stream:
    """One generator: its state as plain values or arrays, and the way to put one back."""

    get: Callable[[], Any]
    put: Callable[[Any], object]


class RandomState:
    """A per-rank object: ``Checkpoint`` stores it from every rank and gives each its own back.

    ``framework(generator)`` gives the framework's streams of a generator by kind, or None for one
    that it does not know; ``framework(None)`` gives its global ones.
    """

    per_rank = True

    def __init__(
        self,
        framework: Callable[[Any], Mapping[str, Stream] | None],
        generators: Sequence[Any] = (),
    ) -> None:
        self._framework = framework
        self._generators = generators
        self._streams()  # a generator of an unknown kind is named now

    def state_dict(self) -> dict[str, Any]:
        """The states of all streams, as plain values and arrays."""
        streams = {name: stream.get() for name, stream in self._streams().items()}
        return {"version": _VERSION, "streams": streams}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put every stream back exactly where ``state`` was taken.

        Raises ``CheckpointError`` when the state lacks one of the streams here. A GPU's stream is
        let be where either side has none.
        """
        if state["version"] != _VERSION:
            raise CheckpointError(
                f"random state: found version {state['version']}, expected {_VERSION}"
            )
        streams, saved = self._streams(), dict(state["streams"])
        if ("cuda" in streams) != ("cuda" in saved):
            logger.warning(
                "random state: saved with a GPU or restored with one, not both; "
                "the GPU's numbers differ from those of the saved run"
            )
            streams.pop("cuda", None)
            saved.pop("cuda", None)
        if streams.keys() != saved.keys():
            raise CheckpointError(
                f"random state: found the streams {', '.join(saved)}; expected "
                f"{', '.join(streams)}; give RandomState the same generators as at the save"
            )
        for name, stream in streams.items():
            stream.put(saved[name])

    def _streams(self) -> dict[str, Stream]:
        streams = {
            "python": Stream(
                lambda: _from_python(random.getstate()),
                lambda state: random.setstate(_to_python(state)),
            ),
            "numpy": Stream(
                lambda: np.random.get_state(legacy=False),
                lambda state: np.random.set_state(state),
            ),
            **(self._framework(None) or {}),
        }
        for i, generator in enumerate(self._generators):
            found = self._framework(generator)
            if found is None:
                found = _plain_streams(generator)
            if found is None:
                raise ValueError(
                    f"RandomState: found {type(generator).__name__}, expected a generator of "
                    "random numbers, or a model that has some"
                )
            streams.update({f"{kind} {i}": stream for kind, stream in found.items()})
        return streams


def _plain_streams(generator: Any) -> dict[str, Stream] | None:
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return {
            "numpy.random.Generator": Stream(
                lambda: bits.state, lambda state: setattr(bits, "state", state)
            )
        }
    if isinstance(generator, random.Random):
        return {
            "random.Random": Stream(
                lambda: _from_python(generator.getstate()),
                lambda state: generator.setstate(_to_python(state)),
            )
        }
    return None


def _from_python(state: tuple[Any, ...]) -> list[Any]:
    version, words, gauss = state
    return [version, np.array(words, np.uint32), gauss]


def _to_python(state: Sequence[Any]) -> tuple[Any, ...]:
    version, words, gauss = state
    return version, tuple(int(word) for word in words), gauss
