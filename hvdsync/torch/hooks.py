"""Hooks on modules: a function goes in, a hook that stays behind when the module is copied out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any


class ForwardHook:
    """A forward hook, or one before it with keyword arguments, of this process's model alone.

    A copied or pickled model does without, and needs no hvdsync to load.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> Any:
        # What takes three arguments and does nothing, in every Python.
        return getattr, (nullcontext(), "__exit__")
