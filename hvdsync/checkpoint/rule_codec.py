"""What an update rule remembers, beside its optimizer: a codec in, one that stores it too out.

For Keras optimizers, whose own variables stay what plain Keras expects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdsync.checkpoint.codec import Codec, broadcast_arrays
from hvdsync.sync.keras_optimizer import LocalTraining, sharing_of


@dataclass
class _WithRule:
    """What the inner codec makes of an object, and what its optimizer's rule remembers."""

    part: Any
    state: dict[str, np.ndarray]


class RuleCodec(Codec):
    """Stores objects as ``inner`` does; ``<name>.update_rule.npz`` is there for those with a rule.

    They are optimizers whose ranks take steps alone, and models that are compiled with one. A
    checkpoint without that file begins the rule anew; one with it opens without the rule too.
    """

    def __init__(self, inner: Codec) -> None:
        self._inner = inner

    def handles(self, obj: Any) -> bool:
        return self._inner.handles(obj)

    def snapshot(self, name: str, obj: Any) -> Any:
        return self._add(obj, self._inner.snapshot(name, obj))

    def view(self, name: str, obj: Any) -> Any:
        return self._add(obj, self._inner.view(name, obj))

    def _add(self, obj: Any, part: Any) -> Any:
        rule = _rule_of(obj)
        return part if rule is None else _WithRule(part, rule.state())

    def write(self, folder: Path, name: str, snapshot: Any) -> None:
        if isinstance(snapshot, _WithRule):
            arrays: dict[str, Any] = snapshot.state
            np.savez(_path(folder, name), **arrays)
            snapshot = snapshot.part
        self._inner.write(folder, name, snapshot)

    def read(self, folder: Path, name: str, obj: Any) -> Any:
        part = self._inner.read(folder, name, obj)
        if _rule_of(obj) is None:
            return part
        path = _path(folder, name)
        if not path.exists():
            return _WithRule(part, {})
        with np.load(path, allow_pickle=False) as stored:
            return _WithRule(part, dict(stored))

    def check(self, obj: Any, tree: Any) -> None:
        self._inner.check(obj, tree.part if isinstance(tree, _WithRule) else tree)

    def apply(self, obj: Any, tree: Any) -> None:
        if not isinstance(tree, _WithRule):
            self._inner.apply(obj, tree)
            return
        self._inner.apply(obj, tree.part)
        rule = _rule_of(obj)
        assert rule is not None
        rule.load(tree.state)

    def broadcast(self, tree: Any, name: str) -> Any:
        """The tree of rank 0 on every rank."""
        pair = (tree.part, tree.state) if isinstance(tree, _WithRule) else (tree, None)
        part, state = broadcast_arrays(pair, name)
        return part if state is None else _WithRule(part, state)

    def versions(self) -> Mapping[str, str]:
        return self._inner.versions()


def _rule_of(obj: Any) -> LocalTraining | None:
    for holder in (obj, getattr(obj, "optimizer", None)):
        sharing = sharing_of(holder)
        if sharing is not None:
            return sharing.local_steps
    return None


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.update_rule.npz"
