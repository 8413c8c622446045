"""``Guard`` of Keras models: written once for TensorFlow and for Keras on both backends."""

from __future__ import annotations

from typing import Any

from hvdsync.guard import guard, keras_state


class KerasGuard(guard.Guard):
    __doc__ = guard.Guard.__doc__

    def check(self, model: Any, optimizer: Any = None) -> bool:
        """To be called once per step, on every rank; True when replicas were repaired.

        Arguments are those of :func:`check_replicas`. Collective at every ``every``-th call, with
        17 bytes a rank on the wire while replicas are equal. Raises :class:`ReplicaMismatch` on
        every rank when they differ, or when a repair did not make them equal, and
        :class:`RankMismatch` when the models' shapes differ, so that none is possible.
        """
        return self._check(
            lambda: keras_state.list_entries(model, optimizer),
            lambda root: keras_state.spread(root, model, optimizer),
            lambda: keras_state.is_nothing_equal(model, optimizer),
        )
