"""PyTorch gradients of all ranks in, their reduction out: flat buckets over Horovod.

``torch`` and ``hvd`` (``horovod.torch``) are handed in, so that importing this needs neither.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any

from hvdsync.comm import clock
from hvdsync.sync.buckets import Bucket, group_positions, plan_buckets


class Wire:
    """How one wrapper's buckets travel: reduction, scaling, compression and process set.

    ``op`` is ``hvd.Average`` or ``hvd.Sum``. ``gradient_predivide_factor`` splits the averaging
    before and after the sum, as in Horovod. ``waited_seconds`` adds up the time in which the
    calling thread stood still for a collective: communication that nothing hid.
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
        self._predivide = gradient_predivide_factor
        self._largest: dict[Any, float] = {}

    def safe_norm(self, dtype: Any) -> float:
        """Below this norm of each rank's tensor no element of what travels for it can overflow."""
        largest = self._largest.get(dtype)
        if largest is None:
            torch = self.torch
            wire, _ = self.compression.compress(torch.empty(0, dtype=dtype))
            largest = torch.finfo(torch.float32 if wire.dtype is torch.bfloat16 else wire.dtype).max
            self._largest[dtype] = largest = largest * min(1.0, self._predivide)
        return largest / self.process_set.size()

    def send(self, flat: Any, name: str) -> tuple[Any, Any]:
        """Start the reduction of a flat tensor; the tensor must stay untouched until receive."""
        wire, ctx = self.compression.compress(flat)
        if wire.dtype is self.torch.bfloat16:
            # Horovod's core knows no bfloat16; float32 holds each of its values.
            wire = wire.float()
        scale = {}
        if self._predivide != 1.0:
            scale = {
                "prescale_factor": 1.0 / self._predivide,
                "postscale_factor": self._predivide,
            }
        self.collectives += 1
        handle = self.hvd.allreduce_async_(
            wire, name=f"{self.name}.{name}", op=self.op, process_set=self.process_set, **scale
        )
        return handle, ctx

    def receive(self, flat: Any, handle: Any, ctx: Any) -> None:
        """Wait for a reduction and leave its result in ``flat``."""
        started = time.perf_counter()
        result = self.hvd.synchronize(handle)
        self.waited_seconds += time.perf_counter() - started
        result = self.compression.decompress(result, ctx)
        if result.data_ptr() != flat.data_ptr():
            flat.copy_(result)

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
        label = f"{self.name}.{name}"
        self.collectives += 2
        handles = [
            hvd.allgather_async(tensor, name=f"{label}.{part}", process_set=self.process_set)
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


class FlatBucket:
    """One contiguous buffer for the gradients of several parameters, and its flight.

    Behind the gradients the buffer carries two flags for each, whether this rank had a gradient
    and whether it was sparse, and one for all of them: whether they may not be finite. Reduced with
    the rest, they tell every rank, at no further collective, which parameters no rank used, which
    need a sparse reduction, and that a verdict is due.
    """

    def __init__(self, torch: Any, bucket: Bucket, tensors: Sequence[Any], label: str) -> None:
        self.label = label
        self.members = bucket.members
        self.tensors = [tensors[i] for i in bucket.members]
        count = len(self.tensors)
        first = self.tensors[0]
        length = bucket.length + 2 * count + 1
        self.flat = torch.zeros(length, dtype=first.dtype, device=first.device)
        self.gradients = self.flat[: bucket.length]
        self.views = self.shaped(self.gradients)
        self.used = self.flat[bucket.length : bucket.length + count]
        self.sparse = self.flat[bucket.length + count : -1]
        self.suspect = self.flat[-1:]
        self.pending = count
        self.missing: list[int] = []
        self.flight: tuple[Any, Any] | None = None

    def shaped(self, flat: Any) -> list[Any]:
        """Views of a flat tensor, of as many elements as ``gradients``, shaped as the tensors."""
        parts = flat.split([tensor.numel() for tensor in self.tensors])
        return [_shaped_like(part, t) for part, t in zip(parts, self.tensors, strict=True)]

    def fill(self, torch: Any, gradients: Sequence[Any | None]) -> None:
        """Copy gradients into their places; ``missing`` then lists the slots that had none."""
        targets, sources, missing, sparse = [], [], [], []
        for i, (gradient, view) in enumerate(zip(gradients, self.views, strict=True)):
            if gradient is None:
                missing.append(i)
            elif gradient.is_sparse:
                sparse.append(i)
            elif gradient is not view:
                targets.append(view)
                sources.append(gradient)
        if targets:
            torch._foreach_copy_(targets, sources)
        self.used.fill_(1)
        self.sparse.zero_()
        self.suspect.zero_()
        for i in missing:
            self.views[i].zero_()
            self.used[i] = 0
        for i in sparse:
            self.views[i].zero_()
            self.sparse[i] = 1
        self.missing = missing

    def show(self, verdict: Any, keys: Sequence[Any], wire: Wire) -> None:
        """Have a verdict look at the filled buffer, and pass its suspicion on with it."""
        limit = wire.safe_norm(self.flat.dtype)
        self.suspect.fill_(verdict.look(self.gradients, self.views, keys, limit))

    def show_reduced(self, verdict: Any, keys: Sequence[Any]) -> None:
        """Have a verdict look at the reduced buffer, where any rank was suspicious."""
        if float(self.suspect) != 0:
            verdict.landed(self.views, keys)


def _shaped_like(part: Any, tensor: Any) -> Any:
    """``part`` in the shape, and where it is dense also the memory order, of ``tensor``."""
    if tensor.is_contiguous() or not _is_dense(tensor):
        return part.view(tensor.shape)
    return part.as_strided(tensor.size(), tensor.stride())


def _is_dense(tensor: Any) -> bool:
    """Whether the strides are a permutation of contiguous ones (channels-last, transposed)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def make_flat_buckets(
    torch: Any,
    tensors: Sequence[Any],
    names: Sequence[str],
    groups: Sequence[Sequence[int]] | None = None,
) -> list[FlatBucket]:
    """Buffers for ``tensors``, given in the order in which their gradients arrive.

    A bucket's label, part of the collective's name, holds a checksum of the parameters in it:
    ranks with different plans can never reduce into one another.
    """
    plan = plan_buckets(
        [tensor.numel() for tensor in tensors],
        [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        groups=groups,
    )
    buckets = []
    for i, bucket in enumerate(plan):
        members = [names[m] for m in bucket.members]
        checksum = zlib.crc32("\0".join(members).encode())
        rest = f"+{len(members) - 1}" if len(members) > 1 else ""
        label = f"bucket{i}[{members[0]}{rest}]#{checksum:08x}"
        buckets.append(FlatBucket(torch, bucket, tensors, label))
    return buckets


class ListReducer:
    """Reduces a list of gradients at once: for frameworks that hand them over after backward.

    The buckets are planned at the first call and again only when the list's shapes change.
    ``groups`` is their number, or lists of positions that travel together.
    """

    def __init__(self, wire: Wire, groups: int | Sequence[Sequence[int]] | None = None) -> None:
        self._wire = wire
        self._groups = groups
        self._plan_of: list[tuple[Any, ...]] = []
        self._buckets: list[FlatBucket] = []
        self._order: list[int] = []

    @property
    def waited_seconds(self) -> float:
        """Seconds spent waiting for collectives so far."""
        return self._wire.waited_seconds

    def reduce(
        self,
        gradients: Sequence[Any | None],
        variables: Sequence[Any],
        verdict: Any = None,
        keys: Sequence[Any] | None = None,
    ) -> list[Any | None]:
        """The reduced gradients, as views that the next call overwrites.

        ``variables`` (tensors) stand for gradients that are None here; where they are None on
        every rank they stay None. All ranks give lists of equal length and shapes. A ``verdict``
        (``hvdsync.guard.torch_nonfinite``) is shown the buffers; there ``keys`` name gradients.
        """
        wire = self._wire
        torch = wire.torch
        signature = [(tuple(v.shape), v.dtype) for v in variables]
        with torch.no_grad():
            if signature != self._plan_of:
                order = list(reversed(range(len(variables))))
                tensors = [variables[i].detach() for i in order]
                names = [f"{i}" for i in order]
                groups = group_positions(self._groups, order)
                self._buckets = make_flat_buckets(torch, tensors, names, groups)
                self._order = order
                self._plan_of = signature
            result: list[Any | None] = [None] * len(variables)
            owners = [[self._order[m] for m in bucket.members] for bucket in self._buckets]
            for bucket, owner in zip(self._buckets, owners, strict=True):
                bucket.fill(torch, [gradients[i] for i in owner])
                if verdict is not None and keys is not None:
                    bucket.show(verdict, [keys[i] for i in owner], wire)
                bucket.flight = wire.send(bucket.flat, bucket.label)
            for bucket, owner in zip(self._buckets, owners, strict=True):
                assert bucket.flight is not None
                wire.receive(bucket.flat, *bucket.flight)
                if verdict is not None and keys is not None:
                    bucket.show_reduced(verdict, [keys[i] for i in owner])
                for slot, i in enumerate(owner):
                    if gradients[i] is not None or float(bucket.used[slot]) > 0:
                        result[i] = bucket.views[slot]
        return result
