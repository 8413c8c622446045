"""Flat PyTorch tensors of all ranks in, their reduction out: one at a time over Horovod.

``torch`` and ``hvd`` (``horovod.torch``) are handed in, so that importing this needs neither.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdsync.comm import clock, failures
from hvdsync.comm.dtypes import dtype_name
from hvdsync.sync.compression.exchange import (
    BucketCompressor,
    Collective,
    Exchange,
    Part,
    State,
)
from hvdsync.sync.compression.memory import Memory
from hvdsync.sync.compression.torch_arrays import TorchArrays
from hvdsync.sync.host_sum import HostSum, Slot, share


@dataclass
class Flight:
    """A flat tensor on its way: the collective under way, and what decides about the next one."""

    name: str
    handle: Any = None
    kind: str = "sum"
    undo: Any = None
    exchange: Exchange | None = None
    parts: Sequence[Part] = ()
    pieces: Sequence[Any] = ()
    states: Sequence[State] = ()
    collectives: int = 1
    shared: HostSum | None = None
    is_over: bool = False


class Wire:
    """How one wrapper's buckets travel: reduction, scaling, compression and process set.

    ``op`` is ``hvd.Average`` or ``hvd.Sum``. ``gradient_predivide_factor`` splits the averaging
    before and after the sum, as in Horovod. ``waited_seconds`` adds up the time in which the
    calling thread stood still for a collective: communication that nothing hid. ``sent_bytes`` adds
    up what this rank gave to collectives; ``memory`` is what a compressor remembers.
    """

    def __init__(
        self,
        torch: Any,
        hvd: Any,
        name: str,
        *,
        compression: Any,
        op: Any,
        gradient_predivide_factor: float = 1.0,
        process_set: Any = None,
    ) -> None:
        self.torch = torch
        self.hvd = hvd
        self.name = name
        self.compression = compression
        self.op = op
        self.process_set = hvd.global_process_set if process_set is None else process_set
        self.waited_seconds = 0.0
        clock.include(self)
        self.collectives = 0
        self.sent_bytes = 0
        self._arrays = TorchArrays(torch)
        self.memory = Memory(self._arrays, compression)
        self._predivide = gradient_predivide_factor
        self._largest: dict[Any, float] = {}

    @property
    def averages(self) -> bool:
        """Whether what comes is the mean over ranks, and not their sum."""
        return bool(self.op != self.hvd.Sum)

    def safe_norm(self, dtype: Any) -> float:
        """Below this norm of each rank's tensor no element of what travels for it can overflow."""
        torch = self.torch
        compressor = self._compressor(dtype)
        if compressor is not None:
            return float(compressor.safe_norm(torch.finfo(dtype).max, self.process_set.size()))
        largest = self._largest.get(dtype)
        if largest is None:
            wire, _ = self._compress(torch.empty(0, dtype=dtype))
            self._largest[dtype] = largest = torch.finfo(wire.dtype).max * min(1.0, self._predivide)
        return largest / self.process_set.size()

    def share(self, named: Sequence[tuple[str, Any]]) -> Sequence[HostSum]:
        """Sums through memory that all ranks have in common, for flat tensors; collective.

        None are given back where the ranks have none, or where the tensors need what only Horovod
        does: another device or type, compression, or a part of the ranks.
        """
        if (
            self.process_set is not self.hvd.global_process_set
            or self._predivide != 1.0
            or not all(self._is_summed_as_it_is(flat) for _, flat in named)
        ):
            return ()
        scale = 1.0 / self.process_set.size() if self.averages else 1.0
        slots = [
            Slot(f"{self.name}.{name}", flat.numpy(), scale, in_place=True) for name, flat in named
        ]
        return share(slots, self._ended) or ()

    def _is_summed_as_it_is(self, flat: Any) -> bool:
        wire, undo = self._compress(flat)
        floats = (self.torch.float32, self.torch.float64)
        whole = not isinstance(self.compression, BucketCompressor) and wire is flat and undo is None
        return whole and flat.device.type == "cpu" and flat.dtype in floats

    def _ended(self, rank: int) -> BaseException | None:
        """The error of who waits for a rank that will not come."""
        error = self.hvd.HorovodInternalError("Horovod has been shut down")
        return failures.of_waiting_for(rank, error, is_initialized=self.hvd.is_initialized())

    def send(
        self, flat: Any, name: str, parts: Sequence[Part] = (), shared: HostSum | None = None
    ) -> Flight:
        """Start the reduction of a flat tensor, which must stay untouched until it is received.

        ``parts`` are the tensors that it begins with, for a compressor to which they matter. With
        ``shared``, ``flat`` is its array.
        """
        if shared is not None:
            self._count(flat)
            shared.post()
            return Flight(name, shared=shared)
        compressor = self._compressor(flat.dtype)
        if compressor is None:
            wire, undo = self._compress(flat)
            return Flight(name, self._reduce(wire, name), undo=undo)
        exchange = compressor.exchange(
            self._arrays, flat, parts, self.memory.recall(parts, flat), self.process_set.size()
        )
        first = next(exchange)
        handle = self._start(first, name)
        return Flight(name, handle, first.kind, exchange=exchange, parts=parts)

    def advance(self, flight: Flight) -> None:
        """Wait for the collective under way and start the one after it, if there is one."""
        started = time.perf_counter()
        if flight.shared is not None:
            flight.is_over = flight.shared.advance()
            self.waited_seconds += time.perf_counter() - started
            return
        result = self.hvd.synchronize(flight.handle)
        self.waited_seconds += time.perf_counter() - started
        if flight.exchange is None:
            if flight.undo is not None:
                result = flight.undo(result)
            flight.pieces, flight.is_over = [result], True
            return
        if flight.kind == "gather":
            result = result.reshape(self.process_set.size(), -1)
        elif flight.kind == "alltoall":
            result, _ = result
        try:
            following = flight.exchange.send(result)
        except StopIteration as done:
            flight.pieces, flight.states = done.value
            flight.is_over = True
        else:
            flight.kind = following.kind
            flight.handle = self._start(following, f"{flight.name}.{flight.collectives}")
            flight.collectives += 1

    def go_on(self, flights: Sequence[Flight]) -> None:
        """Start what follows for those whose collective is over; waits for nothing."""
        for flight in flights:
            if flight.exchange and not flight.is_over and self.hvd.poll(flight.handle):
                self.advance(flight)

    def finish(self, flights: Sequence[Flight]) -> None:
        """Bring flights to their ends side by side: each waits while the others are under way."""
        while under_way := [flight for flight in flights if not flight.is_over]:
            for flight in under_way:
                self.advance(flight)

    def receive(self, flat: Any, flight: Flight, used: Any = None) -> None:
        """Wait for a reduction and leave its result in ``flat``.

        ``used``, a part of ``flat``, comes to more than 0 for those of the flight's parts that any
        rank used. What a compressor remembers of others stays as it was; so does all of it when
        the result is not finite.
        """
        while not flight.is_over:
            self.advance(flight)
        if flight.shared is not None:
            return
        start = 0
        for piece in flight.pieces:
            part = flat[start : start + piece.numel()]
            if part.data_ptr() != piece.data_ptr():
                part.copy_(piece)
            start += piece.numel()
        if flight.exchange is not None and not self.averages:
            flat.mul_(self.process_set.size())
        if flight.states and bool(flat.sum().isfinite()):
            for i, (part, state) in enumerate(zip(flight.parts, flight.states, strict=True)):
                if used is None or float(used[i]) > 0:
                    self.memory.remember(part, state)

    def step_is_done(self) -> None:
        """All tensors of a step have been received."""
        self.memory.count_step()

    def reduce_sparse(self, gradient: Any, like: Any, name: str) -> Any | None:
        """Sum or average of sparse gradients: indices and values of all ranks are gathered.

        ``gradient`` may be None on a rank whose batch did not touch the parameter ``like``. The
        result is coalesced and equal on all ranks, or None when no rank had a gradient.
        """
        torch, hvd = self.torch, self.hvd
        if gradient is None:
            indices = torch.zeros((0, 1), dtype=torch.int64, device=like.device)
            values = like.new_zeros((0, *like.shape[1:]))
        else:
            coalesced = gradient.coalesce()
            indices = coalesced.indices().t().contiguous()
            values = coalesced.values().contiguous()
        started = time.perf_counter()
        handles = [
            self._start(Collective("gather", tensor), f"{name}.{part}")
            for tensor, part in ((indices, "indices"), (values, "values"))
        ]
        indices, values = (hvd.synchronize(handle) for handle in handles)
        self.waited_seconds += time.perf_counter() - started
        if len(indices) == 0:
            return None
        if self.op == hvd.Average:
            values = values / self.process_set.size()
        gathered = torch.sparse_coo_tensor(indices.t(), values, like.shape, check_invariants=False)
        return gathered.coalesce()

    def _compressor(self, dtype: Any) -> BucketCompressor | None:
        """What compresses buckets of this dtype in this step; None if they travel as they are."""
        compressor = self.compression
        if not isinstance(compressor, BucketCompressor):
            return None
        is_for = compressor.handles(dtype_name(dtype))
        return compressor if is_for and self.memory.steps >= compressor.start_step else None

    def _compress(self, flat: Any) -> tuple[Any, Any]:
        """The tensor to be reduced as a whole, and what undoes it, if anything does."""
        undo = None
        wire = flat
        if not isinstance(self.compression, BucketCompressor):
            wire, ctx = self.compression.compress(flat)
            if wire is not flat:
                undo = lambda result: self.compression.decompress(result, ctx)  # noqa: E731
        # Horovod's core knows no bfloat16; float32 holds each of its values.
        return wire.float() if wire.dtype is self.torch.bfloat16 else wire, undo

    def _reduce(self, wire: Any, name: str) -> Any:
        scale = {}
        if self._predivide != 1.0:
            scale = {
                "prescale_factor": 1.0 / self._predivide,
                "postscale_factor": self._predivide,
            }
        return self._counted(self.hvd.allreduce_async_, wire, name, op=self.op, **scale)

    def _start(self, collective: Collective, name: str) -> Any:
        hvd = self.hvd
        if collective.kind == "sum":
            return self._counted(hvd.allreduce_async_, collective.tensor, name, op=hvd.Sum)
        start = hvd.allgather_async if collective.kind == "gather" else hvd.alltoall_async
        return self._counted(start, collective.tensor, name)

    def _count(self, tensor: Any) -> None:
        self.collectives += 1
        self.sent_bytes += tensor.numel() * tensor.element_size()

    def _counted(self, start: Any, tensor: Any, name: str, **options: Any) -> Any:
        self._count(tensor)
        label = f"{self.name}.{name}"
        return start(tensor, name=label, process_set=self.process_set, **options)
