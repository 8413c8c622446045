"""The engine that is PyTorch's ``DistributedDataParallel``, behind the distributed optimizer.

A model goes in; its gradients are averaged over the process group while ``backward()`` runs.
"""

from __future__ import annotations

import inspect
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdsync.comm import clock, process_group, verbs
from hvdsync.comm.comparison import noted, require_equal
from hvdsync.errors import HvdsyncError
from hvdsync.guard.guard import Guard
from hvdsync.guard.torch_nonfinite import TorchVerdict
from hvdsync.sync.options import check_compression, check_gradient_options
from hvdsync.torch.hooks import ForwardHook
from hvdsync.torch.optimizer import (
    DistributedOptimizer,
    NamedParameters,
    _DistributedOptimizer,
    facts_of,
)
from hvdsync.torch.passes import PassReducer, when_backward_is_done

# What this engine decides itself.
_FIXED = {"module", "gradient_as_bucket_view", "init_sync", "process_group", "device_mesh"}

# Weak on both sides: a reducer keeps its model.
_reducers: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[DdpReducer]] = (
    weakref.WeakKeyDictionary()
)


def distribute_optimizer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    compression: Any,
    accumulate: int,
    guard: Guard | None,
    options: Mapping[str, Any],
) -> torch.optim.Optimizer:
    """The optimizer of a model that ``DistributedDataParallel`` reduces from now on.

    Arguments are those of :func:`hvdsync.torch.distribute`. Raises ``ValueError`` for options that
    do not exist, and for parameters that the model does not have; :class:`RankMismatch` on every
    rank when models or options differ.
    """
    _check(options)
    if verbs.size() == 1:
        return DistributedOptimizer(
            optimizer,
            backward_passes_per_step=accumulate,
            average_passes=accumulate > 1,
            guard=guard,
        )
    check_gradient_options(averages=True, passes=accumulate)
    check_compression(compression, engine="ddp")
    names: dict[torch.Tensor, str] = {p: name for name, p in model.named_parameters()}

    parameters = NamedParameters(optimizer, names)
    if strange := [name for name, p in parameters() if p not in names]:
        raise ValueError(
            f"distribute(engine='ddp'): {len(strange)} of the optimizer's parameters are not the "
            f"model's ({', '.join(strange[:5])}), so that nothing would reduce their gradients; "
            "make them part of the model, or use engine='horovod'"
        )
    facts = facts_of(
        optimizer,
        parameters(),
        compression=compression,
        accumulate=accumulate,
        on_nonfinite=None if guard is None else guard.on_nonfinite,
        **options,
    )
    require_equal(
        "the optimizers",
        {**facts, **noted()},
        "Build the same model and optimizer on every rank, with the same options",
    )
    verdict = None
    if guard is not None:
        verdict = TorchVerdict(
            torch,
            guard,
            "ddp",
            lambda: [(p, name, p) for name, p in parameters()],
            process_group.EVERYONE,
        )
    reducer = DdpReducer(
        model,
        parameters,
        passes=accumulate,
        average_passes=accumulate > 1,
        compression=compression,
        verdict=verdict,
        options=options,
    )
    return _DistributedOptimizer(optimizer, reducer)


def let_go() -> None:
    """Have all models let go of the process group, which is about to end.

    The last to hold a group over Gloo waits for its threads, and one of them may wait for Python's
    global interpreter lock. Python's own references are dropped without the lock;
    ``DistributedDataParallel``, in C++, drops its own while it has it.
    """
    for reducer in list(_reducers.values()):
        if (living := reducer()) is not None:
            living.let_go()


def _check(options: Mapping[str, Any]) -> None:
    known = set(inspect.signature(DistributedDataParallel).parameters) - _FIXED
    if unknown := sorted(set(options) - known):
        raise ValueError(
            f"distribute(engine='ddp') was given {', '.join(unknown)}; expected keyword arguments "
            f"of DistributedDataParallel: {', '.join(sorted(known))}"
        )


class DdpReducer(PassReducer):
    """Has ``DistributedDataParallel`` reduce a model's gradients, once every ``passes`` passes.

    Stands in for :class:`hvdsync.torch.gradients.GradientReducer`. The model stays the user's own:
    what the wrapper does around a forward pass happens in its forward hooks, as in PyTorch's
    ``replicate``. Gradients accumulate locally (as sums; as means when ``average_passes``) until
    the pass that reduces. A ``step()`` before that sends what there is through the same buckets,
    by a backward pass that adds nothing.

    Parameters that this rank did not use count as zeros; those that no rank used keep
    ``.grad = None``. ``options`` are those of ``DistributedDataParallel``; unused parameters are
    looked for unless they say otherwise. A ``verdict`` is shown all gradients before they travel.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Callable[[], Sequence[tuple[str, torch.nn.Parameter]]],
        *,
        passes: int,
        average_passes: bool,
        compression: Any,
        verdict: TorchVerdict | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(parameters, passes=passes, average_passes=average_passes, verdict=verdict)
        self.wire = process_group.EVERYONE
        self.waited_seconds = 0.0
        self.sent_bytes = 0
        self._model = model
        self._compression = compression
        # Buffers stay each rank's own, as with Horovod.
        self._options = {"find_unused_parameters": True, "forward_sync_buffers": False, **options}
        self._looks_for_unused = self._options["find_unused_parameters"]
        self._ddp: DistributedDataParallel | None = None
        self._planned: set[torch.Tensor] = set()
        self._sent_last = False
        self._closed = self._is_prepared = False
        self._flags: list[Any] = []
        self._suspect: tuple[Any, Any] | None = None
        if model in _reducers and (previous := _reducers[model]()) is not None:
            previous.close()
        _reducers[model] = weakref.ref(self)
        self._forward_hooks = (
            model.register_forward_pre_hook(ForwardHook(self._before_forward), with_kwargs=True),
            model.register_forward_hook(ForwardHook(self._after_forward)),
        )
        clock.include(self)

    def reset(self) -> None:
        """Forget accumulated passes."""
        self._passes_done = 0
        self._pass_is_open = self._sent_last = False
        if self.verdict is not None:
            self.verdict.begin()

    def close(self) -> None:
        """Let go of the model: it no longer reduces its gradients."""
        super().close()
        for hook in self._forward_hooks:
            hook.remove()
        self.let_go()
        self._closed = True

    def let_go(self) -> None:
        """Drop the wrapper, and with it the group; the next forward pass makes a new one."""
        if self._ddp is not None:
            self._ddp._remove_autograd_hooks()  # type: ignore[no-untyped-call]
            self._ddp = None
        self._planned = set()

    # Around the forward pass

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> Any:
        # After shutdown() a model computes alone.
        is_reduced = torch.is_grad_enabled() and process_group.active() is not None
        ddp = self._wrapper() if is_reduced else None
        self._is_prepared = ddp is not None
        if ddp is None:
            return None
        ddp.require_backward_grad_sync = (
            not self._suspended and self._passes_done + 1 >= self.passes
        )
        return ddp._pre_forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _after_forward(self, module: Any, args: Any, output: Any) -> Any:
        if self._ddp is None or not self._is_prepared:
            return None
        self._is_prepared = False
        return self._ddp._post_forward(output)  # type: ignore[no-untyped-call]

    def _wrapper(self) -> DistributedDataParallel | None:
        """The model's wrapper; a new one when parameters were added or unfrozen since."""
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        if all(p in self._planned for p in trainable):
            return self._ddp
        self.let_go()
        for parameter in trainable:
            self._hook(parameter)
        self._planned = set(trainable)
        whole = _WithSpare(self._model, trainable[0]) if self._looks_for_unused else self._model
        self._ddp = DistributedDataParallel(
            whole, init_sync=False, gradient_as_bucket_view=True, **self._options
        )
        # A weak reference: what C++ holds, Python does not see when it looks for cycles. And no
        # annotations, of which PyTorch would know none that is text.
        this = weakref.proxy(self)
        self._ddp.register_comm_hook(None, lambda state, bucket: this._send(bucket))
        return self._ddp

    # One backward pass

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self._pass_is_open:
            self._open_pass()

    def _open_pass(self) -> None:
        super()._open_pass()
        when_backward_is_done(self._wait)

    def _send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if self.verdict is not None:
            self._show(self.verdict, bucket)
        passes = self._passes_done if self._average_passes else 1
        # Before the sum, which then cannot overflow where no rank's gradient does.
        buffer.div_(dist.get_world_size() * max(passes, 1))
        wire, ctx = self._compression.compress(buffer)
        self.sent_bytes += wire.numel() * wire.element_size()
        future = dist.all_reduce(wire, async_op=True).get_future()
        if bucket.is_last():
            self._sent_last = True
            if self.verdict is not None:
                self._send_flag(buffer.device)
        if ctx is None:
            return future.then(lambda done: done.value()[0])
        decompress = self._compression.decompress
        return future.then(lambda done: buffer.copy_(decompress(done.value()[0], ctx)))

    def _show(self, verdict: TorchVerdict, bucket: dist.GradBucket) -> None:
        values, views = bucket.buffer(), bucket.gradients()
        if values.is_sparse:
            values = values._values()
            views = [values]
        wire, _ = self._compression.compress(values[:0])
        limit = torch.finfo(wire.dtype).max
        self._flags.append(verdict.look(values, views, bucket.parameters(), limit))

    def _send_flag(self, device: torch.device) -> None:
        flags = [torch.as_tensor(flag, device=device).reshape(()) for flag in self._flags]
        self._flags.clear()
        if not flags:
            return
        flag = torch.stack(flags).any().to(torch.int32)
        self._suspect = (flag, dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True))

    def _wait(self) -> None:
        # What is left of backward is that the wrapper waits for its buckets; it asked before.
        started = time.perf_counter()

        def finish() -> None:
            if self._sent_last:
                self.waited_seconds += time.perf_counter() - started
            self._finish_pass()

        when_backward_is_done(finish)

    def _finish_pass(self) -> None:
        self._pass_is_open = False
        if not self._sent_last:
            return
        self._sent_last = False
        self._passes_done = 0
        self.reduced = True
        if self._suspect is None or self.verdict is None:
            return
        (flag, work), self._suspect = self._suspect, None
        work.wait()
        if float(flag) > 0:
            used = [p for _, p in self.parameters() if p.grad is not None]
            self.verdict.landed([p.grad for p in used], used)

    # A step without a pass that reduced

    def flush(self) -> None:
        """Reduce what gradients there are, and leave the results in ``.grad``; collective.

        Called by ``step()`` after fewer than ``passes`` backward passes, or none on this rank.
        Raises ``HvdsyncError`` when there is nothing to reduce.
        """
        if self._closed:
            raise HvdsyncError(
                "this optimizer's model was distributed again, with another optimizer; use that "
                "one, or give each optimizer a model of its own"
            )
        ddp = self._wrapper()
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        if ddp is None or not trainable:
            raise HvdsyncError(
                "this step reduced nothing, because no parameter of the model requires a "
                "gradient; unfreeze those that are trained"
            )
        if self.verdict is not None:
            self.verdict.begin()
        used = trainable
        if self._looks_for_unused:
            # They are told from the graph: only who has a gradient is part of it.
            used = [p for p in trainable if p.grad is not None] or [ddp.module.spare]
        ddp.require_backward_grad_sync = True
        self._pass_is_open = True  # one that adds nothing, and is not counted
        with torch.enable_grad():
            ddp._pre_forward()  # type: ignore[no-untyped-call]
            nothing = torch.stack([_nothing_of(p).to(used[0]) for p in used]).sum()
            ddp._post_forward(nothing).backward()  # type: ignore[no-untyped-call]
        self._finish_pass()


class _WithSpare(torch.nn.Module):
    """A model, for its wrapper, with one parameter more, that no forward pass uses.

    It is what a rank without any gradient has to reduce; and a wrapper that finds an unused
    parameter in each pass does not warn that it looks in vain.
    """

    def __init__(self, model: torch.nn.Module, like: torch.Tensor) -> None:
        super().__init__()
        self.model = model
        self.spare = torch.nn.Parameter(like.detach().new_zeros(1))


def _nothing_of(parameter: torch.Tensor) -> torch.Tensor:
    """A scalar 0 whose gradient is zeros, in the layout that the parameter's gradient has."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        no_rows = torch.zeros(0, dtype=torch.int64, device=parameter.device)
        return torch.nn.functional.embedding(no_rows, parameter, sparse=True).sum()
    return parameter.flatten()[:0].sum()
