"""Gradients of one optimizer, reduced over ranks while backward runs.

Hooks fill flat buckets; when ``backward()`` returns, every ``.grad`` is the reduced one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from horovod.common.exceptions import HorovodInternalError

from hvdsync.errors import HvdsyncError
from hvdsync.guard.torch_nonfinite import TorchVerdict
from hvdsync.sync.buckets import group_positions
from hvdsync.sync.compression.memory import Memory
from hvdsync.sync.torch_reducer import FlatBucket, make_flat_buckets, share_buckets
from hvdsync.sync.torch_wire import Wire
from hvdsync.torch.passes import PassReducer, when_backward_is_done

logger = logging.getLogger(__name__)


class GradientReducer(PassReducer):
    """Watches parameters and reduces their gradients, once every ``passes`` backward passes.

    ``parameters`` gives the current (name, parameter) pairs in order of use; it is asked at each
    reduction, so parameters that are added or unfrozen later are picked up on all ranks at the
    next step. Gradients accumulate locally (as sums; as means when ``average_passes``) until the
    pass that reduces.

    Parameters that this rank did not use count as zeros; those that no rank used keep
    ``.grad = None``, so that an optimizer skips them as it does in one process. Sparse gradients
    (of embeddings) are gathered row by row, or sent densely when ``sparse_as_dense``.

    With ``wire`` None (one process) nothing travels and only ``average_passes`` has an effect.

    A ``verdict`` is shown all gradients before they are reduced, and is asked before the update.
    """

    def __init__(
        self,
        parameters: Callable[[], Sequence[tuple[str, torch.nn.Parameter]]],
        wire: Wire | None,
        *,
        passes: int = 1,
        average_passes: bool = False,
        sparse_as_dense: bool = False,
        groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
        verdict: TorchVerdict | None = None,
    ) -> None:
        super().__init__(parameters, passes=passes, average_passes=average_passes, verdict=verdict)
        self.wire = wire
        self._delivered = False
        self._sparse_as_dense = sparse_as_dense
        self._groups = groups
        self._reduces_this_pass = False
        self._buckets: list[FlatBucket] = []
        self._named: Sequence[tuple[str, torch.nn.Parameter]] = ()
        self._wanted: list[bool] = []
        self._known: dict[torch.Tensor, str] = {}
        # By identity of parameters, which buckets keep: a tensor's own hash is a call into Python.
        self._places: dict[int, FlatBucket] = {}
        self._sparse: dict[torch.Tensor, str] = {}
        self._planned: dict[torch.Tensor, str] = {}
        self._watch(self._trainable())

    @property
    def waited_seconds(self) -> float:
        """Seconds in which training stood still for communication so far."""
        return 0.0 if self.wire is None else self.wire.waited_seconds

    @property
    def memory(self) -> Memory | None:
        """What a compressor remembers of the gradients; None where nothing travels."""
        return None if self.wire is None else self.wire.memory

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has given to collectives so far."""
        return 0 if self.wire is None else self.wire.sent_bytes

    def reset(self) -> None:
        """Forget accumulated passes, and a backward pass that an exception cut short."""
        self._passes_done = 0
        self._delivered = False
        if self.verdict is not None:
            self.verdict.begin()
        if self._pass_is_open:
            self._pass_is_open = False
            try:
                for bucket in self._buckets:
                    self._land(bucket)
            except HorovodInternalError:
                self._abandon()

    def travel(self, wire: Wire | None) -> None:
        """From the next backward pass on reduce over ``wire``, or with None not at all.

        Called between steps, alike on all ranks. The verdict is that of all ranks, or of each.
        """
        if wire is self.wire:
            return
        self.reset()
        self.wire = wire
        if self.verdict is not None:
            self.verdict.process_set = None if wire is None else wire.process_set
        self._watch(self._trainable())

    # Planning

    def _trainable(self) -> dict[torch.Tensor, str]:
        """Names of the parameters that require gradients; the same dictionary until they change."""
        named = self.parameters()
        wanted = [p.requires_grad for _, p in named]
        if named is not self._named or wanted != self._wanted:
            self._named, self._wanted = named, wanted
            self._known = {p: name for name, p in named if p.requires_grad}
        return self._known

    def _watch(self, trainable: dict[torch.Tensor, str]) -> None:
        """Plan buckets for these parameters, from scratch, and hook those that are new."""
        self._buckets, self._places, self._planned = [], {}, trainable
        self._add_buckets({p: n for p, n in trainable.items() if p not in self._sparse})
        for parameter in trainable:
            self._hook(parameter)

    def _add_buckets(self, named: dict[torch.Tensor, str]) -> None:
        if not named or self.wire is None:
            return
        # Gradients arrive in reverse order of use.
        tensors = list(reversed(named))
        names = [named[p] for p in tensors]
        added = make_flat_buckets(torch, tensors, names, group_positions(self._groups, tensors))
        for bucket in added:
            self._places.update({id(p): bucket for p in bucket.tensors})
        self._buckets.extend(added)

    # One backward pass

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self._pass_is_open:
            self._open_pass()
        if self.wire is None and self.verdict is not None:
            self.verdict.look_alone(parameter, parameter.grad)
        if not self._reduces_this_pass:
            return
        bucket = self._places.get(id(parameter))
        if bucket is None:
            return
        bucket.pending -= 1
        if bucket.pending == 0:
            self._send(bucket)
        elif bucket.pending < 0:
            raise RuntimeError(
                "a gradient arrived after its bucket had left for reduction, because one "
                "backward() ran through the parameter twice (re-entrant checkpointing of shared "
                "weights does); use checkpoint(..., use_reentrant=False)"
            )

    def _open_pass(self) -> None:
        super()._open_pass()
        self._reduces_this_pass = (
            self.wire is not None and not self._suspended and self._passes_done >= self.passes
        )
        when_backward_is_done(self._close_pass)

    def _close_pass(self) -> None:
        self._pass_is_open = False
        if not self._suspended and self._passes_done >= self.passes:
            self.flush()

    def _send(self, bucket: FlatBucket) -> None:
        assert self.wire is not None
        if self._delivered and self.wire.op != self.wire.hvd.Average:
            # An average of averages is right again; a sum of sums counts the first ones twice.
            raise RuntimeError(
                f"{self.wire.name}: gradients were computed again after they had been summed "
                f"over ranks and before step(); set backward_passes_per_step (now {self.passes}) "
                "to the number of backward passes of one step"
            )
        with torch.no_grad():
            bucket.fill(torch, [self._dense_gradient(p) for p in bucket.tensors])
            if self._average_passes and self._passes_done > 1:
                bucket.outgoing.flat.div_(self._passes_done)
            if self.verdict is not None:
                bucket.show(self.verdict, bucket.tensors, self.wire)
            earlier = [other.flight for other in self._buckets if other.flight]
            bucket.send(self.wire)
            # A second collective may hide behind the rest of backward, too.
            try:
                self.wire.go_on(earlier)
            except HorovodInternalError:
                self._abandon()
                raise

    def _land(self, bucket: FlatBucket) -> None:
        assert self.wire is not None
        if bucket.flight is not None:
            bucket.receive(self.wire)
        bucket.pending = len(bucket.tensors)

    def _abandon(self) -> None:
        # A rank was lost: Horovod has failed everything in flight, and an elastic job goes on.
        for bucket in self._buckets:
            bucket.flight = None
            bucket.pending = len(bucket.tensors)

    def _dense_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse and self._sparse_as_dense:
            return gradient.to_dense()
        return gradient

    # The end of a step's gradients

    def flush(self) -> None:
        """Reduce what has not left yet, wait for all, and leave the results in ``.grad``.

        Collective. Called when backward ends; and by ``step()`` on a rank that had no backward
        pass, or fewer than ``passes``. Raises ``HvdsyncError`` when there is nothing to reduce.
        """
        if self.wire is None:
            if self.verdict is not None:
                self.verdict.look_at_rest([(p, p.grad) for p in self._trainable()])
            self._average_locally()
        else:
            try:
                self._flush_over(self.wire)
            except HorovodInternalError:
                self._abandon()
                raise
        self._passes_done = 0
        self._pass_is_open = False
        self.reduced = self._delivered = True

    def _average_locally(self) -> None:
        if not self._average_passes or self._passes_done <= 1:
            return
        with torch.no_grad():
            gradients = [p.grad for p in self._trainable() if p.grad is not None]
            torch._foreach_div_(gradients, float(self._passes_done))

    def _flush_over(self, wire: Wire) -> None:
        trainable = self._trainable()
        # Tensors compare by identity here: dictionary views look keys up by hash.
        stale = trainable is not self._planned and trainable.keys() != self._planned.keys()
        if stale:
            self._add_buckets(
                {
                    p: name
                    for p, name in trainable.items()
                    if id(p) not in self._places and p not in self._sparse
                }
            )
        if not trainable:
            raise HvdsyncError(
                f"{wire.name}: this step reduced nothing, because none of the "
                f"{len(self.parameters())} parameters of its optimizer requires a gradient; wrap "
                "the optimizer of the parameters that are trained, or unfreeze some"
            )
        for bucket in self._buckets:
            if bucket.flight is None:
                self._send(bucket)
        wire.finish([bucket.flight for bucket in self._buckets if bucket.flight])
        found_sparse: dict[torch.Tensor, str] = {}
        for bucket in self._buckets:
            self._land(bucket)
            if bucket.is_usual and not self._sparse_as_dense:
                for parameter, view in zip(bucket.tensors, bucket.incoming.views, strict=True):
                    parameter.grad = view
                continue
            if self.verdict is not None:
                bucket.show_reduced(self.verdict, bucket.tensors)
            found_sparse.update(self._deliver(bucket, trainable))
        self._sparse.update(found_sparse)
        for parameter, name in self._sparse.items():
            parameter.grad = self._reduce_sparse(wire, parameter, name)
        wire.step_is_done()
        if stale or found_sparse:
            logger.debug("the reduction is planned anew for %d parameters", len(trainable))
            self._watch(trainable)
        else:
            share_buckets(wire, self._buckets)

    def _deliver(
        self, bucket: FlatBucket, trainable: dict[torch.Tensor, str]
    ) -> dict[torch.Tensor, str]:
        """Make each parameter's ``.grad`` its view; gives back those found to be sparse."""
        incoming = bucket.incoming
        sparse_slots = incoming.sparse.nonzero().flatten().tolist()
        missing = set(bucket.missing)
        for slot, (parameter, view) in enumerate(zip(bucket.tensors, incoming.views, strict=True)):
            if slot in sparse_slots:
                continue
            if slot in missing and not float(incoming.used[slot]) > 0:
                continue
            if self._sparse_as_dense and parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = view.to_sparse(1)
            elif parameter.grad is not view:
                parameter.grad = view
        return {
            bucket.tensors[slot]: trainable.get(bucket.tensors[slot], f"sparse{slot}")
            for slot in sparse_slots
        }

    def _reduce_sparse(self, wire: Wire, parameter: torch.Tensor, name: str) -> torch.Tensor | None:
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse:
            gradient = gradient.to_sparse(1)
        if gradient is not None and self._average_passes and self._passes_done > 1:
            gradient = gradient / self._passes_done
        reduced = wire.reduce_sparse(gradient, parameter.detach(), name)
        if self.verdict is not None:
            if gradient is not None:
                self.verdict.look_alone(parameter, gradient)
            self.verdict.gathered(parameter, reduced)
        return reduced
