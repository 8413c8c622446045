"""The backward passes of a step: parameters in, each pass noticed by its first gradient.

What the reducers of both engines share; what they do with gradients is their own.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvdsync.guard.torch_nonfinite import TorchVerdict


class PassReducer(ABC):
    """Counts backward passes over parameters, and forgets what a verdict saw of the one before.

    ``parameters`` gives the current (name, parameter) pairs in order of use. ``passes`` is how many
    backward passes a step has; ``reduced`` says whether its gradients have been reduced.
    """

    def __init__(
        self,
        parameters: Callable[[], Sequence[tuple[str, torch.nn.Parameter]]],
        *,
        passes: int,
        average_passes: bool,
        verdict: TorchVerdict | None,
    ) -> None:
        self.passes = passes
        self.parameters = parameters
        self.verdict = verdict
        self.reduced = False
        self._average_passes = average_passes
        self._passes_done = 0
        self._pass_is_open = False
        self._suspended = False
        self._hooks: dict[torch.Tensor, Any] = {}

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context in which backward passes only accumulate, whatever ``passes`` says.

        With ``DistributedDataParallel`` the forward pass belongs inside, too.
        """
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()

    def _hook(self, parameter: torch.Tensor) -> None:
        """Notice the gradients of a parameter, once."""
        if parameter in self._hooks:
            return
        # A weak reference: the parameter owns its hook, and must not keep this object alive.
        this = weakref.ref(self)

        def on_gradient(arrived: torch.Tensor) -> None:
            reducer = this()
            if reducer is not None:
                reducer._on_gradient(arrived)

        self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(on_gradient)

    @abstractmethod
    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """The gradient of a parameter is there."""

    def _open_pass(self) -> None:
        """The first gradient of a pass has come."""
        self._pass_is_open = True
        self.reduced = False
        self._passes_done += 1
        if self.verdict is not None:
            self.verdict.begin()


def when_backward_is_done(call: Callable[[], None]) -> None:
    """Have the autograd engine call at the end of the backward pass under way, in this order.

    Also when the pass ends early for parameters that were not used; PyTorch's
    FullyShardedDataParallel waits in the same place.
    """
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]
