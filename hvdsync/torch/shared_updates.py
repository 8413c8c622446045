"""Steps of each rank upon parameters that all ranks share, for PyTorch.

One optimizer's steps come in; what all ranks' steps have come to is in its parameters after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hvdsync.sync.shared_steps import Arrays, SharedSteps
from hvdsync.sync.update_rules import Asynchronous
from hvdsync.torch.functions import broadcast_optimizer_state, broadcast_parameters
from hvdsync.torch.ops import allreduce


class SharedUpdates(SharedSteps):
    """What the asynchronous rule adds to one optimizer; it hears of the steps by hooks.

    ``buffers`` may be set to what gives the (name, tensor) pairs that stay each rank's own until
    replicas are made equal: floating-point ones then have their mean, others become those of rank
    0.
    """

    def __init__(
        self,
        rule: Asynchronous,
        optimizer: torch.optim.Optimizer,
        parameters: Callable[[], Sequence[torch.Tensor]],
    ) -> None:
        super().__init__(rule, hand_over, parameters)
        self.buffers: Callable[[], Iterable[tuple[str, torch.Tensor]]] = lambda: ()
        self._optimizer = optimizer
        self._hooks = (
            optimizer.register_step_pre_hook(lambda *_: self.before_step()),
            optimizer.register_step_post_hook(lambda *_: self.after_step()),
        )

    def equal_now(self) -> list[torch.Tensor] | None:
        """Nothing is meant to be equal on all ranks, or, as None says, all state is."""
        return None if self.replicas_equal else []

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
        self.take_up()


def hand_over(
    parameters: Sequence[torch.Tensor],
    function: Callable[[Arrays], Arrays],
    condition: Callable[[], bool] | None,
) -> None:
    """See :data:`hvdsync.sync.shared_steps.HandOver`; halves are handed over as float32."""
    if condition is not None and not condition():
        return
    with torch.no_grad():
        tensors = [_real(parameter) for parameter in parameters]
        arrays = function([_wide(tensor).numpy(force=True) for tensor in tensors])
        torch._foreach_copy_(tensors, [torch.from_numpy(array) for array in arrays])


def _real(parameter: torch.Tensor) -> torch.Tensor:
    parameter = parameter.detach()
    return torch.view_as_real(parameter) if parameter.is_complex() else parameter


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
