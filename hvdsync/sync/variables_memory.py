"""Copies of variables in this process's memory: current values in, the same values back later.

What an elastic state commits and restores; written once for Keras on both backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


class VariablesMemory:
    """Remembers the values of the variables that ``listed()`` gives, in that order."""

    def __init__(self, listed: Callable[[], Sequence[Any]]) -> None:
        self._listed = listed
        self._values: list[np.ndarray] = []
        self.save()

    def save(self) -> None:
        """Copy the current values."""
        self._values = [np.array(variable) for variable in self._listed()]

    def restore(self) -> None:
        """Put the copied values back; variables that appeared since keep theirs."""
        for variable, value in zip(self._listed(), self._values, strict=False):
            variable.assign(value)
