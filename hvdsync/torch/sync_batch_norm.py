"""Batch normalisation over the batches of all ranks together, on any device.

Each rank's activations go in; they come out normalised as one process would with the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdsync.comm import clock, world
from hvdsync.torch import ops


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation with the statistics of all ranks (stands for Horovod's and PyTorch's).

    Works on ``(N, C, ...)`` inputs of at least two dimensions, on CPUs too, and with different
    numbers of samples on the ranks, none included. In evaluation, or with one rank, it is plain
    batch normalisation. On the wire, for C channels: 2 C + 1 numbers from each rank in the
    forward pass (an all-gather of means, variances and counts, combined as in Chan, Golub and
    LeVeque 1979), and 2 C in the backward pass (an all-reduce).
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``input`` normalised per channel; shape and dtype are kept."""
        if world.current().size == 1 or (not self.training and self.track_running_stats):
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats:
            self._track(mean, variance, count)
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:  # cumulative average
            factor = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _Normalize(torch.autograd.Function):
    # Both passes are synchronous, so one name per kind and width serves all layers in turn.

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        channels = input.shape[1]
        work = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        local_count = input.numel() // channels
        if local_count:
            moments = torch.var_mean(work, _all_but_channels(input), correction=0)
            variance, mean = (moment.double() for moment in moments)
        else:
            variance = mean = input.new_zeros(channels, dtype=torch.float64)
        count = torch.tensor([local_count], dtype=torch.float64, device=input.device)
        mine = torch.cat([mean, variance, count]).unsqueeze(0)
        with clock.spend("stalled"):
            everyone = ops.allgather(mine, name=f"hvdsync.batch_norm.{channels}.statistics")
        means, variances = everyone[:, :channels], everyone[:, channels:-1]
        counts = everyone[:, -1:]
        total = counts.sum()
        if total <= 1:
            raise ValueError(
                f"SyncBatchNorm: {int(total)} value per channel over all ranks; training needs "
                "more than 1"
            )
        mean = (means * counts).sum(0) / total
        variance = ((variances + (means - mean) ** 2) * counts).sum(0) / total
        scale = torch.rsqrt(variance + eps).to(work.dtype)
        shape = _channel_shape(input)
        normal = (work - mean.to(work.dtype).view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, weight, scale, total)
        ctx.mark_non_differentiable(mean, variance, total)
        output = normal
        if weight is not None:
            output = output * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        return output.to(input.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *unused: Any) -> tuple[Any, ...]:
        normal, weight, scale, total = ctx.saved_tensors
        channels = normal.shape[1]
        dims, shape = _all_but_channels(normal), _channel_shape(normal)
        bias_gradient = gradient.sum(dims)
        weight_gradient = (gradient * normal).sum(dims)
        sums = torch.cat([bias_gradient, weight_gradient]).double()
        name = f"hvdsync.batch_norm.{channels}.gradients"
        with clock.spend("stalled"):
            means = ops.allreduce(sums, op=ops.Sum, name=name) / total
        mean_gradient, mean_product = means.to(normal.dtype).split(channels)
        # Derivative of (x - mean) / std with the mean and std of all ranks together.
        centred = gradient - mean_gradient.view(shape) - normal * mean_product.view(shape)
        factor = scale if weight is None else scale * weight
        input_gradient = (centred * factor.view(shape)).to(gradient.dtype)
        return (
            input_gradient,
            None if weight is None else weight_gradient,
            None if weight is None else bias_gradient,
            None,
        )


def _all_but_channels(tensor: torch.Tensor) -> list[int]:
    return [0, *range(2, tensor.dim())]


def _channel_shape(tensor: torch.Tensor) -> list[int]:
    return [1, -1, *(1 for _ in range(2, tensor.dim()))]
