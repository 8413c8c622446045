"""What TensorFlow gradients belong to, and which of them there are on any rank.

Sources (variables, tensors) and this rank's gradients go in; names, and gradients of one kind on
all ranks, come out. TensorFlow and Horovod are handed in.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from types import ModuleType
from typing import Any

from hvdsync.comm import launch

_UNNAMED = "tensor"

# How a gradient travels.
_NONE, _DENSE, _SPARSE = range(3)


def variable_of(source: Any) -> Any:
    """The ``tf.Variable`` (or tensor) behind a ``keras.Variable``; anything else as it is."""
    # Only a Keras variable has a path; its own attribute is taken because `.value` may be cast.
    return source._value if hasattr(source, "path") and hasattr(source, "_value") else source


def name_of(source: Any) -> str:
    """A name that is equal on all ranks: the path of a Keras variable, or the TensorFlow name."""
    return str(getattr(source, "path", None) or getattr(source, "name", None) or _UNNAMED)


def key_of(source: Any) -> Hashable:
    """A hashable identity of a variable or tensor."""
    return variable_of(source).ref()


def checksum_of(sources: Sequence[Any]) -> str:
    """A checksum of the sources' names, equal on all ranks whichever gradients they have."""
    names = [name_of(source) for source in sources]
    parts = [
        f"{name}{source.shape}" if name == _UNNAMED else name
        for name, source in zip(names, sources, strict=True)
    ]
    return f"{zlib.crc32(chr(0).join(parts).encode()):08x}"


def kept_from_folding(tf: ModuleType, tensor: Any) -> Any:
    """The tensor, such that a collective of it runs at every call of the graph.

    Horovod's operations are stateless ones for TensorFlow, which evaluates those of constants once,
    when it optimises a graph, one after the other in no certain order: ranks would wait for one
    another there for ever, or find a partner missing from the second call on.
    """
    # A tensor of eager mode has no op; in a graph it may become a constant.
    if tf.executing_eagerly() or (tf.is_symbolic_tensor(tensor) and not _is_constant(tensor.op)):
        return tensor
    zero = tf.minimum(tf.timestamp(), 0.0)
    if tensor.dtype == tf.bool:
        return tf.logical_or(tensor, tf.cast(zero, tf.bool))
    return tensor + tf.cast(zero, tensor.dtype)


def _is_constant(op: Any) -> bool:
    seen, rest = {op}, [op]
    while rest:
        op = rest.pop()
        if op.type == "Const":
            continue
        if not op.inputs or op.op_def.is_stateful:
            return False
        new = {tensor.op for tensor in op.inputs} - seen
        seen |= new
        rest.extend(new)
    return True


class GradientKinds:
    """Makes gradients of one kind on all ranks: None, dense or sparse.

    A layer may be used on some ranks only, or be looked up sparsely on one and densely on another.
    What is None here and not elsewhere becomes zeros, or no rows, so that one process that sees all
    samples would come to the same; what is None everywhere stays None.

    On the wire: two flags for each gradient, when a graph is first made, and in eager mode at each
    call. In an elastic job some ranks make graphs while others have them, and graphs of TensorFlow
    1 cannot ask: there None must be None on all ranks.
    """

    def __init__(
        self, tf: ModuleType, hvd: ModuleType, process_set: Any, sparse_as_dense: bool
    ) -> None:
        self._tf = tf
        self._hvd = hvd
        self._process_set = process_set
        self._sparse_as_dense = sparse_as_dense
        self._agreed: dict[Hashable, tuple[int, ...]] = {}
        self._last: dict[str, tuple[int, ...]] = {}
        # Set while this rank has no gradients, in a graph that the others have made before.
        self.asks_nothing = False

    def agree(
        self,
        label: str,
        gradients: Sequence[Any],
        sources: Sequence[Any],
        is_local: Sequence[bool],
    ) -> list[Any]:
        """The gradients, alike on all ranks; local ones are left as they are.

        ``label`` names the exchange. Collective where it has not been agreed before.
        """
        own = tuple(
            _NONE if alone else self._kind(gradient)
            for gradient, alone in zip(gradients, is_local, strict=True)
        )
        kinds = self._ask(label, own)
        return [
            gradient if alone else self._convert(gradient, kind, source)
            for gradient, kind, source, alone in zip(
                gradients, kinds, sources, is_local, strict=True
            )
        ]

    def _kind(self, gradient: Any) -> int:
        if gradient is None:
            return _NONE
        sparse = isinstance(gradient, self._tf.IndexedSlices) and not self._sparse_as_dense
        return _SPARSE if sparse else _DENSE

    def _ask(self, label: str, own: tuple[int, ...]) -> tuple[int, ...]:
        tf = self._tf
        if launch.is_elastic() or not tf.compat.v1.executing_eagerly_outside_functions():
            return own
        if self.asks_nothing and not tf.executing_eagerly():
            return self._last[label]
        # A function may be traced again on one rank alone, for a batch of another shape.
        if not tf.executing_eagerly() and (label, own) in self._agreed:
            return self._agreed[label, own]
        with tf.init_scope():
            flags = tf.constant([[k == kind for k in own] for kind in (_DENSE, _SPARSE)])
            dense, sparse = self._hvd.allreduce(
                tf.cast(flags, tf.int32),
                op=self._hvd.Sum,
                name=f"{label}.kinds",
                process_set=self._process_set,
                ignore_name_scope=True,
            ).numpy()
        pairs = zip(dense, sparse, strict=True)
        kinds = tuple(_DENSE if d else _SPARSE if s else _NONE for d, s in pairs)
        self._agreed[label, own] = self._last[label] = kinds
        return kinds

    def _convert(self, gradient: Any, kind: int, source: Any) -> Any:
        tf = self._tf
        if kind == _NONE:
            return None
        variable = variable_of(source)
        if kind == _DENSE:
            return tf.zeros_like(variable) if gradient is None else tf.convert_to_tensor(gradient)
        if gradient is not None:
            return gradient
        no_rows = tf.zeros([0, *variable.shape[1:]], variable.dtype)
        return tf.IndexedSlices(no_rows, tf.zeros([0], tf.int64), tf.shape(variable))
