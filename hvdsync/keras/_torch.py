"""What ``hvdsync.keras`` needs of its PyTorch backend: tensors, collectives, reducers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvdsync.comm import horovod as _horovod
from hvdsync.comm import world
from hvdsync.guard.torch_nonfinite import ListVerdict, TorchVerdict
from hvdsync.sync.accumulation import ListAccumulation
from hvdsync.sync.buckets import group_positions
from hvdsync.sync.compression import torch_compression
from hvdsync.sync.compression.memory import Memory
from hvdsync.sync.keras_local_steps import ShareState, TorchVariableSteps, Trained
from hvdsync.sync.keras_shared_steps import SharedVariables, hand_over_at_once
from hvdsync.sync.torch_reducer import ListReducer
from hvdsync.sync.torch_wire import Wire
from hvdsync.sync.update_rules import Asynchronous, LocalRule

FRAMEWORK = "torch"
hvd = _horovod.load(FRAMEWORK)


Compression = torch_compression(torch)


def to_tensor(value: Any, name: str | None = None) -> torch.Tensor:
    """A detached tensor with this value; Keras variables and NumPy arrays too."""
    value = getattr(value, "_value", value)
    if torch.is_tensor(value):
        return value.detach()
    return torch.from_numpy(np.array(value))


class _TorchReducer:
    """Gradients of one optimizer; see ``hvdsync.sync.keras_optimizer.Reducer``."""

    def __init__(self, wire: Wire, groups: Any) -> None:
        self._wire = wire
        self._groups = (
            groups
            if groups is None or isinstance(groups, int)
            else [[self.key(variable) for variable in group] for group in groups]
        )
        self._reducers: dict[tuple[bool, ...], ListReducer] = {}
        self._is_silent = False

    @property
    def active(self) -> bool:
        """Whether more than one rank takes part, this one among them."""
        if self._is_silent:
            return False
        if not world.is_active():
            world.current()  # raises when a launcher started several ranks
            return False
        process_set = self._wire.process_set
        return bool(process_set.included()) and process_set.size() > 1

    @property
    def waited_seconds(self) -> float:
        """Seconds of communication that no computation hid."""
        return self._wire.waited_seconds

    @property
    def memory(self) -> Memory:
        """What a compressor remembers of the gradients."""
        return self._wire.memory

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has given to collectives so far."""
        return self._wire.sent_bytes

    @property
    def name(self) -> str:
        """Part of the collectives' names."""
        return self._wire.name

    @property
    def process_set(self) -> Any:
        """The ranks that take part."""
        return self._wire.process_set

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Context in which gradients are reduced over this rank alone, and nothing travels."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def steps_of(self, rule: LocalRule, trained: Trained, share: ShareState) -> TorchVariableSteps:
        """Steps that each rank takes alone; meetings travel as gradients do."""
        wire = self._wire if self.active else None
        return TorchVariableSteps(torch, rule, wire, trained, share)

    def key(self, variable: Any) -> Hashable:
        """Identity of a variable."""
        return id(variable)

    @staticmethod
    def outside_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, at which compiled steps leave their graph and come back."""
        return torch.compiler.disable(function)  # type: ignore[no-any-return]

    def reduce(
        self,
        gradients: Sequence[Any],
        sources: Sequence[Any],
        *,
        local: Collection[Hashable] = (),
        scale_local: bool = True,
        verdict: TorchVerdict | None = None,
    ) -> list[Any]:
        """Gradients reduced over ranks, in the given order; those in ``local`` stay this rank's.

        ``verdict`` is shown them; there their positions are their keys.
        """
        if not self.active:
            return list(gradients)
        result = [_strided(gradient) for gradient in gradients]
        is_local = tuple(self.key(source) in local for source in sources)
        shared = [i for i, alone in enumerate(is_local) if not alone]
        reducer = self._reducers.get(is_local)
        if reducer is None:
            reducer = self._reducers[is_local] = ListReducer(
                self._wire, self._positions([sources[i] for i in shared])
            )
        if verdict is not None:
            for i, alone in enumerate(is_local):
                if alone:
                    verdict.look_at_own(i, result[i])
        tensors = [to_tensor(sources[i]) for i in shared]
        reduced = reducer.reduce([result[i] for i in shared], tensors, verdict, shared)
        for i, gradient in zip(shared, reduced, strict=True):
            result[i] = gradient
        if scale_local:
            ranks = self._wire.process_set.size()
            for i, alone in enumerate(is_local):
                if alone and result[i] is not None:
                    result[i] = result[i] / ranks
        return result

    def _positions(self, sources: Sequence[Any]) -> Any:
        if self._groups is None or isinstance(self._groups, int):
            return self._groups
        return group_positions(self._groups, [self.key(source) for source in sources])


def _strided(gradient: Any) -> Any:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def make_reducer(
    name: str,
    *,
    compression: Any,
    op: Any,
    gradient_predivide_factor: float,
    process_set: Any,
    sparse_as_dense: bool,
    groups: Any,
) -> Any:
    """The reducer of one optimizer's gradients."""
    wire = Wire(
        torch,
        hvd,
        name,
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
    )
    return _TorchReducer(wire, groups)


def make_local_steps(reducer: Any, rule: Any, trained: Any, share_state: Any) -> Any:
    """Steps that each rank takes alone."""
    if isinstance(rule, Asynchronous):
        return SharedVariables(rule, hand_over_at_once, trained, share_state)
    return reducer.steps_of(rule, trained, share_state)


def make_verdict(guard: Any) -> Any:
    """What a guard makes of gradients before each update."""
    return ListVerdict(torch, guard)


def differentiate(loss: Callable[[], Any], variables: Sequence[Any]) -> list[Any]:
    """The gradients of a loss, which is computed here; each None or an array."""
    found = torch.autograd.grad(loss(), [v.value for v in variables], allow_unused=True)
    return [None if g is None else g.detach().cpu().numpy() for g in found]


def make_accumulation(passes: int, average: bool) -> Any:
    """Gradients added up over backward passes."""
    return ListAccumulation(passes, average)


def allreduce(
    value: Any, name: str | None, op: Any, prescale: float, postscale: float, compression: Any
) -> torch.Tensor:
    """Element-wise reduction over ranks."""
    tensor = to_tensor(value)
    if not hvd.is_initialized():
        return tensor * (prescale * postscale)
    wire, ctx = compression.compress(tensor)
    narrow = wire.dtype is torch.bfloat16  # which Horovod does not know
    reduced = hvd.allreduce(
        wire.float() if narrow else wire,
        op=op,
        prescale_factor=prescale,
        postscale_factor=postscale,
        name=name,
    )
    return compression.decompress(reduced.to(wire.dtype), ctx)


def allgather(value: Any, name: str | None) -> torch.Tensor:
    """Concatenation over ranks along axis 0."""
    tensor = to_tensor(value)
    return hvd.allgather(tensor, name=name) if hvd.is_initialized() else tensor


def broadcast(value: Any, root_rank: int, name: str | None) -> torch.Tensor:
    """The value of rank ``root_rank``."""
    tensor = to_tensor(value)
    return hvd.broadcast(tensor, root_rank, name=name) if hvd.is_initialized() else tensor


def reducescatter(value: Any, name: str | None, op: Any) -> torch.Tensor:
    """Reduction over ranks, of which each gets its part of axis 0."""
    tensor = to_tensor(value)
    return hvd.reducescatter(tensor, op=op, name=name) if hvd.is_initialized() else tensor


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return hvd.allreduce(tensor, op=hvd.Sum, name=name)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return hvd.allreduce(gradient, op=hvd.Sum, name=f"{ctx.name}.backward"), None


@torch.compiler.disable
def sum_over_ranks(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The sum over ranks, which lets gradients through."""
    return _SumOverRanks.apply(tensor, name)  # type: ignore[no-any-return, no-untyped-call]


def are_initialized(variables: Sequence[Any]) -> bool:
    """Whether the variables have values: always."""
    return True


def eagerly(function: Any, *args: Any) -> Any:
    """Run a function at once."""
    return function(*args)


def as_lost_rank(error: BaseException) -> HorovodInternalError | None:
    """None: PyTorch's collectives raise the error that elastic training recovers from."""
    return None


def stamp_batches(loop: Any) -> None:
    """None: Keras fetches a batch before it tells that the batch begins."""


class _Pass(torch.utils.data.IterableDataset[Any]):
    """One pass over batches, begun anew by each iteration."""

    def __init__(self, begin: Callable[[], Iterator[Any]], length: int) -> None:
        self._begin = begin
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._begin()


def make_dataset(begin: Callable[[], Iterator[Any]], length: int) -> Any:
    """What ``fit`` takes, of batches in NumPy arrays; each pass of ``begin`` has ``length``."""
    return torch.utils.data.DataLoader(_Pass(begin, length), batch_size=None)


def first_batches(data: Any, count: int) -> None:
    """None: there is no shorter way than to iterate."""


def padded_batches(data: Any, count: int, scales: Any, with_weights: Any) -> None:
    """None: there is no shorter way than to iterate."""
