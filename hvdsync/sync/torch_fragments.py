"""Replicas in PyTorch that meet in fragments: each rank's own tensors in, equal ones out.

``torch`` is handed in; which fragments are due, the optimizer's steps decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvdsync.sync.torch_reducer import FlatBucket, make_flat_buckets, shaped
from hvdsync.sync.torch_wire import Wire
from hvdsync.sync.update_rules import DiLoCo, LocalRule, cut

# (Name, tensor), alike on all ranks.
Named = Sequence[tuple[str, Any]]
# (Names, this rank's tensors, what came of them over ranks); raises when that is not to be used.
Judge = Callable[[Sequence[str], Sequence[Any], Sequence[Any]], None]


class TorchFragments:
    """The parameters of one optimizer, in ``rule.fragments`` parts of about equal bytes.

    :meth:`synchronize` makes parts equal on all ranks: by their mean, or by an outer step from
    anchors, which are the parameters' values as they are when this is made. ``statistics`` are
    further tensors, which have their mean with the last part. With ``wire`` None, in one process,
    nothing travels. ``judge`` is shown what came of each bucket before it is used.

    On the wire: the bytes of a part, in buckets, one all-reduce each.
    """

    def __init__(
        self,
        torch: Any,
        rule: LocalRule,
        wire: Wire | None,
        parameters: Named,
        statistics: Named = (),
        judge: Judge | None = None,
    ) -> None:
        self._torch = torch
        self._wire = wire
        self._judge = judge
        self.parameters = [parameter for _, parameter in parameters]
        sizes = [p.numel() * p.element_size() for p in self.parameters]
        outer = rule if isinstance(rule, DiLoCo) else None
        self._parts = [
            self._buckets(f"fragment{i}", [parameters[p] for p in run], outer)
            for i, run in enumerate(cut(sizes, rule.fragments))
        ]
        if statistics and self._parts:
            self._parts[-1] += self._buckets("statistics", statistics, None)

    def __len__(self) -> int:
        return len(self._parts)

    def _buckets(self, label: str, named: Named, outer: DiLoCo | None) -> list[_Bucket]:
        names = [name for name, _ in named]
        flats = make_flat_buckets(self._torch, [tensor for _, tensor in named], names)
        return [
            _Bucket(self._torch, flat, label, [names[m] for m in flat.members], outer)
            for flat in flats
        ]

    def synchronize(self, which: Iterable[int]) -> None:
        """Make the parts of these numbers equal on all ranks; collective."""
        buckets = [bucket for i in which for bucket in self._parts[i]]
        with self._torch.no_grad():
            for bucket in buckets:
                bucket.depart(self._wire)
            for bucket in buckets:
                bucket.arrive(self._wire, self._judge)

    def tensors(self, which: Iterable[int]) -> list[Any]:
        """Parameters and statistics in the parts of these numbers."""
        return [tensor for i in which for bucket in self._parts[i] for tensor in bucket.tensors]

    def outer_state(self) -> dict[str, list[Any]]:
        """Anchor and momentum of each parameter, in the order given; views. Empty without them."""
        of_parameter = {
            id(tensor): pair
            for part in self._parts
            for bucket in part
            for tensor, *pair in zip(bucket.tensors, *bucket.outer_views(), strict=False)
        }
        if not of_parameter:
            return {}
        anchors, momenta = zip(*(of_parameter[id(p)] for p in self.parameters), strict=True)
        return {"anchor": list(anchors), "momentum": list(momenta)}


class _Bucket:
    """Tensors that travel together, and what the outer optimizer remembers of them."""

    def __init__(
        self, torch: Any, flat: FlatBucket, label: str, names: list[str], outer: DiLoCo | None
    ) -> None:
        self._torch = torch
        self._flat = flat
        self._label = f"{label}.{flat.label}"
        self._names = names
        self._rule = outer
        self.tensors = flat.tensors
        if outer is not None:
            with torch.no_grad():
                flat.fill(torch, self.tensors)
            self._anchor = flat.outgoing.gradients.clone()
            self._momentum = torch.zeros_like(self._anchor)

    def depart(self, wire: Wire | None) -> None:
        """Send this rank's values; where there is an outer optimizer, their way from the anchor."""
        flat = self._flat
        flat.fill(self._torch, self.tensors)
        if self._rule is not None:
            sent = flat.outgoing.gradients
            self._torch.sub(self._anchor, sent, out=sent)
        if wire is not None:
            flat.send(wire, self._label)

    def arrive(self, wire: Wire | None, judge: Judge | None) -> None:
        """Put what has come of all ranks' values into the tensors."""
        if wire is not None:
            self._flat.receive(wire)
        met = self._flat.incoming
        if judge is not None:
            judge(self._names, self.tensors, met.views)
        if self._rule is not None:
            anchor, momentum = self._rule.outer_step(self._anchor, self._momentum, met.gradients)
            self._anchor.copy_(anchor)
            self._momentum.copy_(momentum)
            met.gradients.copy_(anchor)
        self._torch._foreach_copy_(self.tensors, met.views)

    def outer_views(self) -> list[list[Any]]:
        """Anchors and momenta, shaped as the tensors; none where there is no outer optimizer."""
        if self._rule is None:
            return [[], []]
        return [shaped(self._anchor, self.tensors), shaped(self._momentum, self.tensors)]
