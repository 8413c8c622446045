"""Gradients of PyTorch, looked at before they travel: buffers in, a verdict before the update out.

Used by ``hvdsync.torch`` and by Keras's PyTorch backend; ``torch`` is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdsync.comm import verbs, world
from hvdsync.guard import nonfinite
from hvdsync.guard.fingerprints import flatten, kind_of
from hvdsync.guard.guard import Guard, StepCount
from hvdsync.guard.keras_input import input_of_train_step
from hvdsync.sync.tensorflow_gradients import name_of


class TorchVerdict:
    """What this rank saw of one optimizer's gradients, and what all ranks make of it.

    Each buffer is read once, right after it was filled and before its reduction overwrites it: its
    Euclidean norm is within ``limit`` only if no element is NaN or infinite and no sum of ranks'
    elements can overflow. Otherwise its tensors are counted one by one, and a flag that travels
    with the buffer makes every rank look at the reduced values, and exchange what it has found
    before the update.

    ``tensors`` gives (key, name, tensor) of all gradients in the order of use; ``find_input`` what
    they were computed from, if the guard was shown nothing. ``process_set`` is None where, and
    while, nothing is reduced. On the wire: nothing of its own but, in a step with a flag, one
    all-gather of 24 bytes per tensor and rank.
    """

    def __init__(
        self,
        torch: Any,
        guard: Guard,
        name: str,
        tensors: Callable[[], Sequence[tuple[Any, str, Any]]],
        process_set: Any = None,
        find_input: Callable[[], Any] = lambda: None,
    ) -> None:
        self.guard = guard
        self._torch = torch
        self._name = name
        self._tensors = tensors
        self.process_set = process_set
        self._find_input = find_input
        self._steps = StepCount()
        self._local: dict[Any, tuple[int, int]] = {}
        self._norms: list[tuple[Sequence[Any], Any]] = []
        self._reduced: dict[Any, int] = {}
        self._seen: set[Any] = set()
        self._flagged = False

    def begin(self) -> None:
        """Forget gradients that are computed anew, or that nobody took a step with."""
        self._local.clear()
        self._norms.clear()
        self._reduced.clear()
        self._seen.clear()
        self._flagged = False

    def look(self, flat: Any, views: Sequence[Any], keys: Sequence[Any], limit: float) -> Any:
        """Look at a buffer before it is sent, ``views`` being its tensors; gives its flag."""
        torch = self._torch
        if flat.device.type != "cpu":
            # Nobody waits for an accelerator here: what it finds is read when it is needed.
            norms = torch.stack(torch._foreach_norm(list(views)))
            self._norms.append((keys, norms))
            return ~(torch.linalg.vector_norm(norms) <= limit) | self._has_bad_loss()
        bad = not self._square(flat) <= limit * limit
        if bad:
            self._count(views, keys)
        # Of this rank alone, and never reduced, are gradients that were looked at before.
        return bad or bool(self._local) or self._has_bad_loss()

    def landed(self, views: Sequence[Any], keys: Sequence[Any]) -> None:
        """Look at a reduced buffer whose flag some rank has set."""
        self._flagged = True
        for key, view in zip(keys, views, strict=True):
            if bad := sum(count(self._torch, view)):
                self._reduced[key] = bad

    def look_alone(self, key: Any, gradient: Any) -> None:
        """Look at a gradient that does not travel in a buffer."""
        self._seen.add(key)
        values = _values(gradient)
        if not values.numel():
            return
        if values.device.type != "cpu":
            self._norms.append(([key], self._torch.linalg.vector_norm(values)[None]))
        elif not math.isfinite(self._square(values)):
            self._count([values], [key])

    def look_at_own(self, key: Any, gradient: Any) -> None:
        """Look at a gradient that stays this rank's, before any buffer is looked at."""
        if gradient is not None:
            self._count([_values(gradient)], [key])

    def gathered(self, key: Any, gradient: Any) -> None:
        """Look at a sparse gradient that was gathered from all ranks."""
        if gradient is None or not gradient._values().numel():
            return
        if not math.isfinite(self._square(gradient._values())):
            self.landed([gradient._values()], [key])

    def look_at_rest(self, gradients: Sequence[tuple[Any, Any]]) -> None:
        """Look at those of (key, gradient) that no bucket and no hook has shown."""
        for key, gradient in gradients:
            if gradient is not None and key not in self._seen:
                self.look_alone(key, gradient)

    def to_be_applied(self, step: Callable[[], int] | None = None) -> bool:
        """Whether the update is to be made; the same on all ranks, and collective after a flag.

        To be asked once per step, when all gradients have arrived; ``step`` gives its number, where
        it is not that of the calls. Raises :class:`NonFiniteGradient` on every rank.
        """
        counted = self._steps.next()
        try:
            if not self._is_flagged():
                return True
            tensors = self._tensors()
            row = self._row(tensors)
            rows = row
            if self.process_set is not None:
                rows = world.current().allgather(row, f"{self._name}.nonfinite", self.process_set)
            watched = [nonfinite.Watched(name, kind_of(t), t.numel()) for _, name, t in tensors]
            number = counted + self.guard.steps_before if step is None else step()
            return self.guard._judge(rows.reshape(-1, len(row)), watched, number)
        finally:
            self.begin()
            self.guard._forget()

    def _square(self, tensor: Any) -> float:
        """The square of a tensor's norm."""
        if tensor.dtype in (self._torch.float32, self._torch.float64) and tensor.is_contiguous():
            # A quarter faster than the norm: as fast as memory is read.
            flat = tensor.view(-1)
            return float(self._torch.dot(flat, flat))
        norm = float(self._torch.linalg.vector_norm(tensor))
        return norm * norm

    def _is_flagged(self) -> bool:
        if self.process_set is not None:
            return self._flagged
        # Alone: nothing was reduced.
        self._read_norms()
        return bool(self._local) or bool(self._has_bad_loss())

    def _row(self, tensors: Sequence[tuple[Any, str, Any]]) -> np.ndarray:
        self._read_norms()
        local = np.array([self._local.get(key, (0, 0)) for key, _, _ in tensors], np.int64)
        reduced = np.array([self._reduced.get(key, 0) for key, _, _ in tensors], np.int64)
        inputs = self._count_input()
        bad_loss = bool(self._has_bad_loss())
        return nonfinite.make_row(verbs.rank(), inputs, bad_loss, local, reduced)

    def _read_norms(self) -> None:
        for keys, norms in self._norms:
            for key, norm in zip(keys, norms.tolist(), strict=True):
                if not math.isfinite(norm):
                    self._local[key] = (nonfinite.UNCOUNTED, nonfinite.UNCOUNTED)
        self._norms.clear()

    def _count(self, views: Sequence[Any], keys: Sequence[Any]) -> None:
        for key, view in zip(keys, views, strict=True):
            found = count(self._torch, view)
            if any(found):
                self._local[key] = found

    def _count_input(self) -> tuple[int, int] | None:
        batches = list(self.guard._batches) or self._find_input()
        leaves = [leaf for _, leaf in flatten("", batches) if hasattr(leaf, "dtype")]
        if not leaves:
            return None
        counts = [count(self._torch, leaf) for leaf in leaves]
        return sum(nan for nan, _ in counts), sum(inf for _, inf in counts)

    def _has_bad_loss(self) -> Any:
        losses = [self._torch.as_tensor(loss).detach() for loss in self.guard._losses]
        if not losses:
            return False
        bad = ~self._torch.isfinite(self._torch.stack([loss.sum() for loss in losses])).all()
        return bool(bad) if bad.device.type == "cpu" else bad


class ListVerdict:
    """The same for a Keras optimizer on PyTorch; see ``hvdsync.sync.keras_optimizer.Verdict``."""

    def __init__(self, torch: Any, guard: Guard) -> None:
        self.guard = guard
        self._torch = torch

    def run(
        self,
        optimizer: Any,
        sharing: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        update: Callable[[Sequence[Any]], Any],
    ) -> None:
        """Reduce gradients, and call ``update`` with them unless the guard is against it.

        Raises :class:`NonFiniteGradient` on every rank.
        """
        reducer = sharing.reducer
        verdict = TorchVerdict(
            self._torch,
            self.guard,
            reducer.name,
            lambda: [(i, name_of(v), v.value.detach()) for i, v in enumerate(variables)],
            reducer.process_set if reducer.active else None,
            input_of_train_step,
        )
        if reducer.active:
            gradients = reducer.reduce(
                gradients,
                variables,
                local=sharing.local,
                scale_local=sharing.scale_local,
                verdict=verdict,
            )
        else:
            verdict.look_at_rest(list(enumerate(gradients)))
        if verdict.to_be_applied(lambda: int(optimizer.iterations) + 1):
            update(gradients)


def judge_meeting(
    torch: Any,
    guard: Guard,
    names: Sequence[str],
    tensors: Sequence[Any],
    met: Sequence[Any],
    step: int,
) -> None:
    """Look at what comes of ranks' parameters when replicas meet, before it is used.

    ``tensors`` are still this rank's own; ``met``, which is equal on all ranks, is made of their
    mean. Raises :class:`NonFiniteGradient` on every rank unless the guard only warns. On the wire:
    nothing while all is finite, otherwise one all-gather of 24 bytes per tensor and rank.
    """
    if all(torch.isfinite(norm) for norm in torch._foreach_norm(list(met))):
        return
    local = np.array([count(torch, tensor) for tensor in tensors], np.int64)
    reduced = np.array([sum(count(torch, tensor)) for tensor in met], np.int64)
    row = nonfinite.make_row(verbs.rank(), None, False, local, reduced)
    rows = world.current().allgather(row, "hvdsync.meeting.nonfinite").reshape(-1, len(row))
    watched = [
        nonfinite.Watched(name, kind_of(t), t.numel())
        for name, t in zip(names, tensors, strict=True)
    ]
    guard._judge_meeting(rows, watched, step + guard.steps_before)


def count(torch: Any, values: Any) -> tuple[int, int]:
    """(NaN, infinite) elements of a tensor or array."""
    tensor = _values(torch.as_tensor(values))
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0, 0
    return int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())


def _values(tensor: Any) -> Any:
    tensor = tensor.detach()
    return tensor._values() if tensor.is_sparse else tensor
