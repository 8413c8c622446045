"""Steps of each rank upon parameters that all ranks share, for PyTorch.

One optimizer's steps come in; what all ranks' steps have come to is in its parameters after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdsync.guard.watch import watch
from hvdsync.sync.asynchronous import SharedParameters
from hvdsync.sync.update_rules import Asynchronous
from hvdsync.torch.functions import broadcast_optimizer_state, broadcast_parameters
from hvdsync.torch.ops import allreduce


class SharedUpdates:
    """What the asynchronous rule adds to one optimizer: its parameters are shared from its first
    step on, and changed by what each rank's steps change in them.

    ``parameters`` gives the current ones, alike on all ranks. ``buffers`` may be set to what gives
    the (name, tensor) pairs that stay each rank's own until replicas are made equal:
    floating-point ones then have their mean, others become those of rank 0.
    """

    def __init__(
        self,
        rule: Asynchronous,
        optimizer: torch.optim.Optimizer,
        parameters: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        self.rule = rule
        self.buffers: Callable[[], Iterable[tuple[str, torch.Tensor]]] = lambda: ()
        self.shared: SharedParameters | None = None
        self.replicas_equal = True
        self._optimizer = optimizer
        self._parameters = parameters
        self._shared_ones: Sequence[torch.Tensor] = ()
        self._views: list[torch.Tensor] = []
        self._is_outdated = False
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    @property
    def waited_seconds(self) -> float:
        """Seconds that exchanges of parameters took so far."""
        return 0.0 if self.shared is None else self.shared.waited_seconds

    def _before_step(self, *_: Any) -> None:
        parameters = self._parameters()
        if self.shared is not None and len(self._shared_ones) != len(parameters):
            # Some were added, on all ranks: what the others have come to is kept.
            self.synchronize_replicas()
            self.shared.close()
            self.shared = None
        if self.shared is None:
            self._shared_ones = parameters
            arrays = [_float(_real(p)).numpy(force=True) for p in parameters]
            self.shared = SharedParameters(
                arrays, staleness=self.rule.staleness, wait_limit=watch.wait_limit()
            )
            self._views = [torch.from_numpy(values) for values in self.shared.values]
        elif self._is_outdated:
            self._copy_in()
            self.shared.reset()
        else:
            return
        self._is_outdated = False
        self._copy_out()

    def _after_step(self, *_: Any) -> None:
        assert self.shared is not None
        self._copy_in()
        self.shared.exchange()
        self._copy_out()
        self.replicas_equal = False

    def _copy_in(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._views, [_real(p) for p in self._shared_ones])

    def _copy_out(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_([_real(p) for p in self._shared_ones], self._views)

    def equal_now(self) -> list[torch.Tensor] | None:
        """Nothing is meant to be equal on all ranks, or, as None says, all state is."""
        return None if self.replicas_equal else []

    def synchronize_replicas(self) -> None:
        """Make all state equal on all ranks; collective, whatever steps each has made."""
        if self.shared is None or self._is_outdated:
            return  # all have what they were given, and no step has been made from there
        self._copy_in()
        moved = self.shared.agree()
        self._copy_out()
        if moved:
            self._meet()
        self.replicas_equal = True

    def _meet(self) -> None:
        with torch.no_grad():
            for name, buffer in self.buffers():
                if buffer.is_floating_point():
                    buffer.copy_(allreduce(buffer, name=f"hvdsync.asynchronous.{name}"))
        broadcast_parameters([b for _, b in self.buffers() if not b.is_floating_point()])
        broadcast_optimizer_state(self._optimizer, 0)

    def state_dict(self) -> dict[str, Any]:
        """Nothing beyond the parameters themselves."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Share, from the next step on, the parameters that rank 0 has then."""
        self._is_outdated = True
        self.replicas_equal = True


def _real(parameter: torch.Tensor) -> torch.Tensor:
    parameter = parameter.detach()
    return torch.view_as_real(parameter) if parameter.is_complex() else parameter


def _float(tensor: torch.Tensor) -> torch.Tensor:
    """Halves are shared in float32: what others add is not rounded away."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
