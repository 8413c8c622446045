"""PyTorch gradients of all ranks in, their reduction out: flat buckets over Horovod.

``torch`` and ``hvd`` (``horovod.torch``) are handed in, so that importing this needs neither.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from hvdsync.sync.buckets import Bucket, group_positions, plan_buckets
from hvdsync.sync.compression.exchange import Part
from hvdsync.sync.torch_wire import Flight, Wire


class FlatBucket:
    """One contiguous buffer for the gradients of several parameters, and its flight.

    Behind the gradients the buffer carries two flags for each, whether this rank had a gradient
    and whether it was sparse, and one for all of them: whether they may not be finite. Reduced with
    the rest, they tell every rank, at no further collective, which parameters no rank used, which
    need a sparse reduction, and that a verdict is due.
    """

    def __init__(
        self, torch: Any, bucket: Bucket, tensors: Sequence[Any], names: Sequence[str], label: str
    ) -> None:
        self.label = label
        self.members = bucket.members
        self.tensors = [tensors[i] for i in bucket.members]
        self.parts = [Part(names[i], _shape_in_memory(tensors[i])) for i in bucket.members]
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
        self.flight: Flight | None = None

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

    def send(self, wire: Wire) -> None:
        """Start the reduction of what was filled in."""
        self.flight = wire.send(self.flat, self.label, self.parts)

    def receive(self, wire: Wire) -> None:
        """Wait for the reduction and leave its result in the buffer."""
        assert self.flight is not None
        wire.receive(self.flat, self.flight, self.used)
        self.flight = None

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


def _shape_in_memory(tensor: Any) -> tuple[int, ...]:
    """The shape whose elements lie in memory one behind the other, as they do in a bucket."""
    shape = tuple(tensor.shape)
    if tensor.is_contiguous() or not _is_dense(tensor):
        return shape
    strides = tensor.stride()
    return tuple(shape[i] for i in sorted(range(len(shape)), key=lambda i: -strides[i]))


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
        buckets.append(FlatBucket(torch, bucket, tensors, names, label))
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
                bucket.send(wire)
            wire.finish([bucket.flight for bucket in self._buckets if bucket.flight])
            for bucket, owner in zip(self._buckets, owners, strict=True):
                bucket.receive(wire)
                if verdict is not None and keys is not None:
                    bucket.show_reduced(verdict, [keys[i] for i in owner])
                for slot, i in enumerate(owner):
                    if gradients[i] is not None or float(bucket.used[slot]) > 0:
                        result[i] = bucket.views[slot]
            wire.step_is_done()
        return result
