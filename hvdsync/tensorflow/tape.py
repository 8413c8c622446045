"""A gradient tape whose gradients are reduced over ranks: a tape goes in, the same one comes out.

Composition around the user's ``tf.GradientTape``; whatever is not defined here is the tape's own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from hvdsync.comm import horovod as _horovod
from hvdsync.comm import launch
from hvdsync.sync.options import check_compression, check_gradient_options
from hvdsync.sync.tensorflow_gradients import key_of
from hvdsync.sync.tensorflow_reducer import GraphReducer
from hvdsync.tensorflow.compression import Compression

hvd = _horovod.load("tensorflow")

# A new tape is recorded at every step; its reducer, with the graphs made for eager mode, is not.
_reducers: dict[Hashable, GraphReducer] = {}


class _DistributedGradientTape:
    """See :func:`DistributedGradientTape`."""

    def __init__(self, tape: tf.GradientTape, reducer: GraphReducer, scale_local: bool) -> None:
        self._wrapped = tape
        self._reducer = reducer
        self._scale_local = scale_local
        self._local_sources: set[Hashable] = set()

    def __enter__(self) -> _DistributedGradientTape:
        self._wrapped.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self._wrapped.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        if name == "_wrapped":  # not set yet: while being copied
            raise AttributeError(name)
        return getattr(self._wrapped, name)

    @property
    def waited_seconds(self) -> float:
        """Seconds of communication that no computation hid, over all steps of this kind of tape."""
        return self._reducer.waited_seconds

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent of gradients, over all steps of this kind of tape."""
        return self._reducer.sent_bytes

    def register_local_source(self, source: Any) -> None:
        """Keep this source's gradient to its rank; it is never reduced."""
        self._local_sources.add(key_of(source))

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """As ``tf.GradientTape.gradient``, reduced over ranks.

        The structure is that of ``sources``; gradients that are None stay None. Names of
        collectives are generic always, so ``use_generic_names`` changes nothing.
        """
        if isinstance(unconnected_gradients, bool):  # Horovod's fourth positional argument
            unconnected_gradients = tf.UnconnectedGradients.NONE
        gradients = self._wrapped.gradient(target, sources, output_gradients, unconnected_gradients)
        flat = tf.nest.flatten(gradients)
        reduced = self._reducer.reduce(
            flat,
            tf.nest.flatten(sources),
            local=self._local_sources,
            scale_local=self._scale_local,
        )
        return tf.nest.pack_sequence_as(gradients, reduced)

    def get_local_and_global_gradients(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """(source, gradient) pairs of registered local sources, and of all others."""
        gradients = tf.nest.flatten(self.gradient(target, sources, output_gradients))
        local: list[tuple[Any, Any]] = []
        shared: list[tuple[Any, Any]] = []
        for source, gradient in zip(tf.nest.flatten(sources), gradients, strict=True):
            chosen = local if key_of(source) in self._local_sources else shared
            chosen.append((source, gradient))
        return local, shared


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = hvd.global_process_set,
    scale_local_gradients: bool = True,
    *,
    name: str = "DistributedGradientTape",
) -> Any:
    """The tape, with ``gradient()`` reduced over ranks (stands for Horovod's of the same name).

    Arguments:
        gradtape: a ``tf.GradientTape``, recorded or to be entered; persistent ones too. Sources
            may be ``tf.Variable``, ``keras.Variable`` or watched tensors, in any structure.
        device_dense, device_sparse: accepted for compatibility; gradients are reduced where
            they are.
        compression: what travels in place of gradients; see :class:`Compression`.
        sparse_as_dense: send ``tf.IndexedSlices`` densely instead of gathering their rows.
        op: ``Average``, ``Sum`` or ``Adasum``.
        gradient_predivide_factor: gradients are divided by it before the sum and multiplied
            after, with ``op=Average`` only.
        num_groups, groups: a number of groups, or lists of sources that travel together. By
            default gradients travel in buckets of a few MiB, in the order in which they appear.
        process_set: ranks among which gradients are reduced.
        scale_local_gradients: divide gradients of local sources by the number of ranks.
        name: part of the collectives' names; two tapes that are used at the same time over
            variables of the same names need different ones.

    With one rank, gradients are the tape's own and nothing is added to the graph. Raises
    ``ValueError`` for options that do not go together.
    """
    groups = check_gradient_options(
        averages=op == hvd.Average,
        predivide=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
    )
    check_compression(compression, adds=op in (hvd.Average, hvd.Sum), elastic=launch.is_elastic())
    listed: Any = groups
    if groups is not None and not isinstance(groups, int):
        listed = tuple(tuple(key_of(v) for v in group) for group in groups)
    key = (
        name,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        listed,
        process_set.process_set_id,
    )
    reducer = _reducers.get(key)
    if reducer is None:
        reducer = _reducers[key] = GraphReducer(
            tf,
            hvd,
            name,
            compression=compression,
            op=op,
            gradient_predivide_factor=gradient_predivide_factor,
            process_set=process_set,
            sparse_as_dense=sparse_as_dense,
            groups=groups,
        )
    return _DistributedGradientTape(gradtape, reducer, scale_local_gradients)


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = hvd.Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: Any = hvd.global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """A :func:`DistributedGradientTape` that leaves the weights of ``local_layers`` to each rank.

    ``local_layers`` is a ``tf.keras.layers.Layer`` or several; their weights must exist already.
    Stands for Horovod's of the same name.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for weight in local_weights(local_layers, tf.keras.layers.Layer):
        tape.register_local_source(weight)
    return tape


def local_weights(layers: Any, layer_class: Any) -> list[Any]:
    """The trainable weights of one layer, of several, or of None; ``ValueError`` for others."""
    if layers is None:
        return []
    listed = [layers] if isinstance(layers, layer_class) else list(layers)
    if not all(isinstance(layer, layer_class) for layer in listed):
        raise ValueError("All local layers must be of tf.keras.layers.Layer type.")
    return [weight for layer in listed for weight in layer.trainable_weights]
