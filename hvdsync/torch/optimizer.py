"""The distributed optimizer: a plain optimizer in, the same one with averaged gradients out.

The wrapped optimizer keeps its own state, hooks and schedulers; reduction hangs on its step hook.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from hvdsync.comm import launch, process_group, verbs, windows
from hvdsync.comm.comparison import noted, require_equal
from hvdsync.guard.guard import Guard
from hvdsync.guard.torch_nonfinite import TorchVerdict
from hvdsync.sync.options import (
    check_combination,
    check_compression,
    check_gradient_options,
    momentum_of,
    option_facts,
)
from hvdsync.sync.torch_wire import Wire
from hvdsync.sync.update_rules import Asynchronous
from hvdsync.torch.compression import Compression
from hvdsync.torch.gradients import GradientReducer
from hvdsync.torch.local_updates import STATE_KEY, LocalUpdates
from hvdsync.torch.ops import hvd
from hvdsync.torch.shared_updates import SharedUpdates

if TYPE_CHECKING:
    from hvdsync.torch.ddp import DdpReducer

    Reducer: TypeAlias = GradientReducer | DdpReducer


class _DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer whose gradients are reduced over ranks before it sees them.

    Everything that this class does not define is the wrapped optimizer's own: ``param_groups``,
    ``state``, ``defaults``, ``state_dict()``, hooks. Both may be used, by a scheduler or a
    gradient scaler for instance; a step of either reduces once.
    """

    # Attributes of the wrapper itself; any other is read from and written to the wrapped one.
    # ``step`` is here because learning-rate schedulers replace it on the object they are given.
    _OWN = frozenset({"_wrapped", "_reducer", "_local", "_hooks", "_asked_to_synchronize", "step"})

    def __init__(
        self,
        wrapped: torch.optim.Optimizer,
        reducer: Reducer | None,
        local: LocalUpdates | SharedUpdates | None = None,
    ) -> None:
        # Not Optimizer.__init__: there is one set of groups and state, the wrapped optimizer's.
        self._wrapped = wrapped
        self._reducer = reducer
        self._local = local
        self._asked_to_synchronize = False
        if reducer is not None:
            self._hooks = (
                wrapped.register_step_pre_hook(_reduce_before_step(reducer)),
                wrapped.register_step_post_hook(_close_step(reducer)),
            )

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped":  # not set yet: while being copied or unpickled
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._OWN:
            object.__delattr__(self, name)
        else:
            delattr(self._wrapped, name)

    def __repr__(self) -> str:
        return f"Distributed{self._wrapped!r}"

    def __getstate__(self) -> dict[str, Any]:
        return self._wrapped.__getstate__()  # type: ignore[no-untyped-call]

    # What a plain optimizer does

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of the wrapped optimizer, with reduced gradients.

        ``closure`` is evaluated on this rank's data; its gradients are reduced and the loss that
        it gives is averaged, so that optimizers that decide by the loss decide alike everywhere.
        """
        if self._asked_to_synchronize:
            self._asked_to_synchronize = False
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after "
                "optimizer.synchronize(); hvdsync reduces once all the same, where Horovod would "
                "reduce twice. Neither call is needed: gradients are reduced in backward()",
                stacklevel=2,
            )
        return self._wrapped.step() if closure is None else self._wrapped.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """PyTorch's own; also forgets backward passes that were accumulated and not used."""
        if self._reducer is not None:
            self._reducer.reset()
        self._wrapped.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, in its own form.

        Where ranks take steps alone it has one key more, "update_rule", which plain optimizers do
        not read: the number of steps, and DiLoCo's anchors and momentum.
        """
        state = self._wrapped.state_dict()
        own = None if self._local is None else self._local.state_dict()
        return {**state, STATE_KEY: own} if own else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of the plain or of the distributed optimizer, of any update rule."""
        if self._reducer is not None:
            self._reducer.reset()
        self._wrapped.load_state_dict(state_dict)
        if self._local is not None:
            self._local.load_state_dict(state_dict.get(STATE_KEY))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its gradients are reduced from the next step on, on all ranks."""
        self._wrapped.add_param_group(param_group)

    # Update rules

    @property
    def replicas_equal(self) -> bool:
        """Whether parameters are equal on all ranks now, which local steps leave them not to be.

        The same on all ranks, but for ``Asynchronous()``; nothing travels.
        """
        return self._local is None or self._local.replicas_equal

    def synchronize_replicas(self) -> None:
        """Make model and optimizer state equal on all ranks, where local steps left them not to be.

        An early meeting of what has not just met; then all ranks get the optimizer state of rank 0.
        To be called before evaluation; ``Checkpoint.save`` does so itself. Collective, and nothing
        travels where gradients are averaged. Raises :class:`RankMismatch` on every rank when ranks
        have taken different numbers of steps, which ``Asynchronous()`` alone allows.
        """
        if self._local is not None:
            self._local.synchronize_replicas()

    # What Horovod adds

    def synchronize(self) -> None:
        """Leave the reduced gradients in ``.grad``.

        ``backward()`` has done so already, unless this rank ran no, or not all of the step's,
        backward passes. Collective in that case; kept for scripts written for Horovod.
        """
        if self._reducer is None:
            return
        self._asked_to_synchronize = True
        if not self._reducer.reduced:
            self._reducer.flush()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context around ``step()`` after ``synchronize()``; kept for scripts written for Horovod.

        A step never reduces twice, so there is nothing left to skip.
        """
        self._asked_to_synchronize = False
        yield

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which ``backward()`` only accumulates; the next one outside reduces all."""
        if self._reducer is None:
            yield
            return
        with self._reducer.suspended():
            yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change after how many backward passes gradients are reduced."""
        if self._reducer is not None:
            self._reducer.passes = passes

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Name of each watched parameter in its collectives, as Horovod's wrapper has it."""
        return {} if self._reducer is None else {p: n for n, p in self._reducer.parameters()}

    @property
    def waited_seconds(self) -> float:
        """Seconds in which training stood still for gradients of other ranks so far."""
        if self._local is not None:
            return self._local.waited_seconds
        return 0.0 if self._reducer is None else self._reducer.waited_seconds

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients, or of what stands for them, that this rank has sent so far.

        What is given to collectives is counted; of an all-reduce a ring passes on twice that,
        less one share of it, of an all-gather as many as there are other ranks. What asynchronous
        ranks put into shared parameters is not counted.
        """
        if self._local is not None:
            wire = getattr(self._local, "wire", None)
            return 0 if wire is None else wire.sent_bytes
        return 0 if self._reducer is None else self._reducer.sent_bytes

    @property
    def collectives(self) -> int:
        """How many collectives this rank has taken part in for gradients so far."""
        wire = getattr(self._local or self._reducer, "wire", None)
        return 0 if wire is None else wire.collectives


def _reduce_before_step(reducer: Reducer) -> Callable[..., Any]:
    def before_step(
        optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            if not reducer.reduced:
                reducer.flush()
            _judge(optimizer, reducer)
            return None
        closure = _reduced_closure(closure, reducer, optimizer)
        if len(args) > 1:
            return (args[0], closure, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure}

    return before_step


def _judge(optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
    """Have the guard look at what the optimizer is about to use."""
    # A fused optimizer is called by a scaler at every step, and told of those to be left out.
    left_out = getattr(optimizer, "found_inf", None)
    if reducer.verdict is None or (left_out is not None and float(left_out) > 0):
        return
    if not reducer.verdict.to_be_applied():
        # Without a gradient nothing changes: no weight, no momentum, no count of steps.
        for _, parameter in reducer.parameters():
            parameter.grad = None


def _reduced_closure(
    closure: Callable[[], Any], reducer: Reducer, optimizer: torch.optim.Optimizer
) -> Callable[[], Any]:
    def evaluate() -> Any:
        reducer.reset()
        reducer.reduced = False
        loss = closure()
        if not reducer.reduced:
            reducer.flush()
        _judge(optimizer, reducer)
        if loss is None or reducer.wire is None:
            return loss
        local = torch.as_tensor(loss).detach()
        average = verbs.average_metrics({"loss": local.item()})["loss"]
        return torch.full_like(local, average)

    return evaluate


def _close_step(reducer: Reducer) -> Callable[..., None]:
    def after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        reducer.reset()
        reducer.reduced = False

    return after_step


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: Any = hvd.global_process_set,
    *,
    update: Any = None,
    average_passes: bool = False,
    guard: Guard | None = None,
) -> torch.optim.Optimizer:
    """An optimizer that averages gradients over ranks (stands for Horovod's of the same name).

    Gradients are reduced while ``backward()`` runs, and when it returns each ``.grad`` holds the
    average: clip, unscale or inspect it there, then call ``step()``. No ``synchronize()`` is
    needed. With one rank the optimizer behaves bit for bit as the plain one.

    Arguments:
        optimizer: the plain optimizer; it keeps its class, state and hooks.
        named_parameters: (name, parameter) pairs of all its parameters, usually
            ``model.named_parameters()``; without them they are named by group and position.
        compression: what travels in place of gradients; see :class:`Compression`.
        backward_passes_per_step: reduce after that many backward passes; gradients add up
            locally until then. A ``step()`` before that reduces what there is.
        op: ``hvd.Average``, ``hvd.Sum`` or ``hvd.Adasum``.
        gradient_predivide_factor: with ``Average``, divide by this before the sum and multiply
            after it.
        num_groups, groups: an explicit partition into buckets: a number of buckets, or lists of
            parameters. By default buckets are of at most 4 MiB, in reverse order of use.
        sparse_as_dense: send sparse gradients as dense tensors.
        process_set: the ranks among which to reduce.
        update: the update rule: None or ``Synchronous()``; or ``LocalSGD(period)`` or
            ``DiLoCo(period)``, by which each rank takes steps alone, and parameters meet every so
            many; or ``Asynchronous()``, by which all ranks' steps change parameters that they
            share, over MPI. :func:`distribute` has a model's buffers meet, too.
        average_passes: divide by the number of backward passes that were accumulated, so that a
            shorter last step of an epoch has its true average.
        guard: judges gradients before each update; see ``on_nonfinite`` of :class:`Guard`.

    On the wire: one all-reduce per bucket, its gradients and two flags for each of them.
    Raises ``ValueError`` for names that are missing or doubled and for options that make no sense
    together, :class:`LaunchError` for ``Asynchronous()`` in a launch that is not over MPI, and
    :class:`RankMismatch` on every rank when names, shapes, dtypes or options differ between ranks.
    ``step()`` raises what the guard does.
    """
    groups = check_gradient_options(
        averages=op == hvd.Average,
        predivide=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        passes=backward_passes_per_step,
    )
    elastic = launch.is_elastic()
    check_compression(
        compression,
        adds=op in (hvd.Average, hvd.Sum),
        elastic=elastic,
        momentum=momentum_of(optimizer),
    )
    _check_members(groups)
    names = _names(optimizer, named_parameters)
    alone = verbs.size() == 1 and not elastic
    if not alone and process_group.active() is not None:
        raise ValueError(
            "DistributedOptimizer reduces over Horovod, but init(engine='ddp') started a process "
            "group; call distribute(model, optimizer), or init() without it"
        )
    rule = check_combination(
        update,
        compression=compression,
        averages=op == hvd.Average,
        everyone=process_set is hvd.global_process_set,
        elastic=elastic,
    )
    if isinstance(rule, Asynchronous):
        if alone:
            rule = None  # there is nobody to share with
        else:
            windows.require_launch()
    if op == hvd.Adasum and guard is not None:
        raise ValueError("a guard judges averages and sums of gradients; found op=Adasum with it")
    if op == hvd.Adasum and not alone:
        return hvd.DistributedOptimizer(
            optimizer,
            named_parameters=[(name, p) for p, name in names.items()],
            compression=compression,
            backward_passes_per_step=backward_passes_per_step,
            op=op,
        )

    parameters = NamedParameters(optimizer, names)
    wire = None
    if not alone and process_set.included():
        facts = facts_of(
            optimizer,
            parameters(),
            compression=compression,
            backward_passes_per_step=backward_passes_per_step,
            gradient_predivide_factor=gradient_predivide_factor,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            average_passes=average_passes,
            update=str(rule),
            on_nonfinite=None if guard is None else guard.on_nonfinite,
        )
        wire = Wire(
            torch,
            hvd,
            _agreed_name(facts, process_set, elastic),
            compression=compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            process_set=process_set,
        )
    averages = average_passes and backward_passes_per_step > 1
    if rule is None and wire is None and guard is None and not averages:
        return _DistributedOptimizer(optimizer, None)
    verdict = None
    if guard is not None:
        verdict = TorchVerdict(
            torch,
            guard,
            "hvdsync" if wire is None else wire.name,
            lambda: [(p, name, p) for name, p in parameters()],
            None if wire is None else process_set,
        )
    reducer = GradientReducer(
        parameters,
        wire,
        passes=backward_passes_per_step,
        average_passes=average_passes,
        sparse_as_dense=sparse_as_dense,
        groups=groups,
        verdict=verdict,
    )
    if isinstance(rule, Asynchronous):
        reducer.travel(None)
        shared = SharedUpdates(rule, optimizer, lambda: [p for _, p in parameters()])
        return _DistributedOptimizer(optimizer, reducer, shared)
    local = None if rule is None else LocalUpdates(rule, optimizer, reducer, guard)
    return _DistributedOptimizer(optimizer, reducer, local)


class NamedParameters:
    """(Name, parameter) of all groups; by group and position where ``names`` has none.

    The same list at each call until the optimizer has other parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> None:
        self._optimizer = optimizer
        self._names = names
        self._named: list[tuple[str, torch.nn.Parameter]] = []

    def __call__(self) -> list[tuple[str, torch.nn.Parameter]]:
        groups = [group["params"] for group in self._optimizer.param_groups]
        known = [p for _, p in self._named]
        if len(known) != sum(map(len, groups)) or not all(map(is_, known, chain(*groups))):
            self._named = [
                (self._names.get(p, f"group{i}.param{j}"), p)
                for i, group in enumerate(groups)
                for j, p in enumerate(group)
            ]
        return self._named


def facts_of(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    **options: Any,
) -> dict[str, Any]:
    """What ranks must have in common of an optimizer, its options and its parameters."""
    facts = option_facts(optimizer, **options)
    facts["number of parameters"] = len(parameters)
    for i, (name, p) in enumerate(parameters):
        facts[f"parameter {i}"] = f"{name} {tuple(p.shape)} {p.dtype}"
    return facts


def _check_members(groups: Any) -> None:
    if groups is None or isinstance(groups, int):
        return
    seen: set[int] = set()
    for parameter in (p for group in groups for p in group):
        if not isinstance(parameter, torch.Tensor):
            raise ValueError("groups must consist of torch.Tensor")
        if id(parameter) in seen:
            raise ValueError("a parameter can appear only once in groups")
        seen.add(id(parameter))


def _names(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None,
) -> dict[torch.Tensor, str]:
    if named_parameters is None:
        return {}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced "
            "by model.named_parameters()"
        )
    seen: set[str] = set()
    doubled = sorted({name for name, _ in pairs if name in seen or seen.add(name)})  # type: ignore[func-returns-value]
    if doubled:
        raise ValueError(f"parameter names must be unique; found twice: {', '.join(doubled)}")
    names = {p: name for name, p in pairs}
    unnamed = [
        f"group {i}, position {j}, shape {tuple(p.shape)}"
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
        if p not in names
    ]
    if unnamed:
        raise ValueError(
            f"named_parameters was given, but {len(unnamed)} of the optimizer's parameters are "
            f"not in it: {'; '.join(unnamed[:5])}; name all of them, or none"
        )
    return names


_wrappers = 0


def _agreed_name(facts: Mapping[str, Any], process_set: Any, elastic: bool) -> str:
    """One name on all ranks for this wrapper's collectives, after comparing what they wrap.

    The first rank's count decides, so ranks that made different numbers of wrappers before still
    agree. In an elastic job a worker that joins makes its wrapper while the others make none:
    there the local count must do.
    """
    global _wrappers
    _wrappers += 1
    name = f"optimizer{_wrappers}"
    if elastic:
        return name
    require_equal(
        "the optimizers",
        {**facts, **noted()},
        "Build the same model and optimizer on every rank, with the same options",
        group=process_set,
    )
    first = process_set.ranks[0] if process_set.ranks else 0
    return str(verbs.broadcast_object(name, first, "hvdsync.distribute.name", process_set))
