"""The random streams of PyTorch: a generator in, its streams out; used with Keras on it too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvdsync.checkpoint.randomness import Stream


def streams(generator: Any) -> dict[str, Stream] | None:
    """The stream of a ``torch.Generator``; of None the global ones, on the CPU and this GPU."""
    import torch

    if generator is None:
        found = {"torch": _stream(torch.get_rng_state, torch.set_rng_state)}
        if torch.cuda.is_available():
            found["cuda"] = _stream(torch.cuda.get_rng_state, torch.cuda.set_rng_state)
        return found
    if isinstance(generator, torch.Generator):
        return {"torch.Generator": _stream(generator.get_state, generator.set_state)}
    return None


def _stream(get: Callable[[], Any], put: Callable[[Any], object]) -> Stream:
    import torch

    return Stream(
        lambda: get().numpy().copy(), lambda state: put(torch.from_numpy(np.array(state)))
    )
