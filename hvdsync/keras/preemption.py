"""Preemption inside Keras ``fit``: a signal on any rank in, a checkpoint and one end on all out.

Exported as ``hvd.callbacks.PreemptionCallback``, for both backends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvdsync.checkpoint.preemption import Preemption
from hvdsync.keras._base_callback import DistributedCallback
from hvdsync.keras.checkpoint import Checkpoint


class PreemptionCallback(DistributedCallback):
    """After SIGTERM or SIGUSR1 on any rank all ranks save after the same batch, and end.

    The checkpoint holds ``model`` (with its optimizer, when compiled), ``epoch``, the number of
    whole epochs, and ``batch``, the number of batches of the next one that are done; its step is
    the optimizer's own count. :class:`CheckpointCallback` takes it up, from the beginning of that
    epoch. To go on with the very next batch, save where the data stands with ``state``, restore
    with ``Checkpoint.restore`` and call ``fit`` with ``initial_epoch``.

    Arguments:
        checkpoint: where to save; ``CheckpointCallback(...).checkpoint`` will do.
        exit_code: the process ends with it, by ``SystemExit``, right after the save. With None
            ``fit`` returns instead, after Keras ran the end of the epoch for all callbacks, as if
            the epoch were whole; ``preempted`` is then True.
        state: gives more to save, called with the number of batches done in this epoch; for
            instance ``lambda batches: {"data": sampler.state_dict(consumed=batches * 64)}``.
        preemption: one that is installed already, to share it with other code; without it the
            callback listens while ``fit`` runs.

    Exchanges between ranks are those of :meth:`Preemption.requested`, called after each batch.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        exit_code: int | None = 0,
        *,
        state: Callable[[int], Mapping[str, Any]] | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        self.exit_code = exit_code
        self.preempted = False
        self._state = state
        self._given = preemption
        self._preemption = preemption or Preemption()
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.preempted = self.ends_all_ranks = False
        if self._given is None:
            self._preemption = Preemption().install()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.preempted or not self._preemption.requested():
            return
        self.preempted = True
        more = {} if self._state is None else self._state(batch + 1)
        step = int(self.model.optimizer.iterations)
        self.checkpoint.save(step, model=self.model, epoch=self._epoch, batch=batch + 1, **more)
        if self.exit_code is None:
            self.model.stop_training = self.ends_all_ranks = True
            return
        # Waits for a save in the background.
        self.checkpoint.close()
        self.on_train_end()
        raise SystemExit(self.exit_code)

    def on_train_end(self, logs: Any = None) -> None:
        if self._given is None:
            self._preemption.remove()
