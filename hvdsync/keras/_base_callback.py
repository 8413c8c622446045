"""What the callbacks of ``hvdsync.keras`` share: equal conditions and equal ends on all ranks.

A model that is about to be fitted goes in; it is checked, and made to stop everywhere at once.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import keras

from hvdsync.comm import launch, verbs, world
from hvdsync.comm.comparison import noted, require_equal
from hvdsync.comm.recurring import RecurringVerdict
from hvdsync.errors import HvdsyncError
from hvdsync.sync.keras_optimizer import lift_loss_scaling, sharing_of

logger = logging.getLogger(__name__)


class _StopTogether(keras.callbacks.Callback):
    """Last in the list: makes ``stop_training`` of any rank that of all, after the same batch.

    Whatever set it (early stopping on one rank, a local value), the ranks leave together instead of
    waiting in a collective for those that left. Within an epoch ranks ask one another some times a
    second, so that a rank goes on for some batches; at each batch where ``TerminateOnNaN`` is among
    the callbacks. A callback that stops all ranks after the same batch, and says so by
    ``ends_all_ranks``, is taken at its word.
    """

    def __init__(self, siblings: list[Any]) -> None:
        super().__init__()
        self._siblings = siblings
        self._wish = False
        self._verdict = RecurringVerdict("hvdsync.keras.stop")

    def on_train_begin(self, logs: Any = None) -> None:
        at_once = any(isinstance(c, keras.callbacks.TerminateOnNaN) for c in self._siblings)
        every = 1 if verbs.agree_any(at_once) else None
        self._verdict = RecurringVerdict("hvdsync.keras.stop", every)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._wish = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if any(getattr(callback, "ends_all_ranks", False) for callback in self._siblings):
            return
        self._wish |= bool(self.model.stop_training)
        self.model.stop_training = self._verdict.ask(self._wish)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = verbs.agree_any(self._wish or self.model.stop_training)


class _CompareRanks(keras.callbacks.Callback):
    """First in the list: refuses a ``fit`` that ranks would leave, or go through, differently.

    ``RankMismatch`` on every rank when they have different numbers of batches or epochs, or other
    callbacks that talk to other ranks; callbacks that do not may be on some ranks only.
    """

    def __init__(self, siblings: list[Any]) -> None:
        super().__init__()
        self._siblings = siblings

    def on_train_begin(self, logs: Any = None) -> None:
        if launch.is_elastic():
            return  # a worker that joins begins while the others train
        talking = [type(c).__name__ for c in self._siblings if isinstance(c, DistributedCallback)]
        params = self.params or {}
        require_equal(
            "calls of fit",
            {
                "callbacks of hvdsync": talking,
                "number of batches": params.get("steps"),
                "epochs": params.get("epochs"),
                "optimizer": type(self.model.optimizer).__name__,
                "number of trainable variables": len(self.model.trainable_variables),
                **noted(),
            },
            "Give fit() the same callbacks, epochs and batches per epoch on every rank: where the "
            "shares of the data differ in length, even them out first: hvd.even_batches(data, "
            "policy='min' or 'pad'), or hvd.shard of the whole data",
        )


class DistributedCallback(keras.callbacks.Callback):
    """Base of the callbacks: prepares the model once, whichever of them is given."""

    # Position in the list: callbacks that change what the others see go before them.
    _first = False
    #: Whether this callback has set ``stop_training``, on all ranks after the same batch.
    ends_all_ranks = False

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if world.current().size == 1:
            return
        owner = _list_that_calls()
        if owner is not None:
            self._take_place(owner.callbacks)
        if getattr(model, "optimizer", None) is not None:
            prepare(model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """As in Keras; written out so that the ends of batches stay in the thread that trains.

        Keras gives them to other threads when no callback has one of its own, and decides so before
        :class:`_StopTogether`, whose collectives must keep their order, is in the list.
        """
        self.on_batch_end(batch, logs=logs)

    def _take_place(self, siblings: list[Any]) -> None:
        if self._first and siblings[0] is not self:
            siblings.remove(self)
            siblings.insert(0, self)
        # Keras appends its own (history, progress bar) before it sets the model.
        if not any(isinstance(callback, _StopTogether) for callback in siblings):
            comparing = _CompareRanks(siblings)
            comparing.set_model(self.model)
            siblings.insert(0, comparing)
            siblings.append(_StopTogether(siblings))


def _list_that_calls() -> Any:
    """The ``CallbackList`` whose ``set_model`` is running, or None when called by hand.

    A callback is told of its model and parameters, but not of its siblings; the call stack is
    the only way from one to the other.
    """
    frame = inspect.currentframe()
    for _ in range(6):
        if frame is None:
            return None
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            return owner
        frame = frame.f_back
    return None


def loop_of_fit() -> Any:
    """The iterator over the batches of the ``fit`` that is calling, or None.

    Keras tells callbacks nothing of the data; again the call stack is the only way.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "fit" and "epoch_iterator" in frame.f_locals:
            return frame.f_locals["epoch_iterator"]
        frame = frame.f_back
    return None


def prepare(model: Any) -> None:
    """Make a compiled model fit for several ranks, or raise when it cannot be."""
    lifted = lift_loss_scaling(keras, model.optimizer)
    if lifted is not model.optimizer:
        model.optimizer = lifted
        forget_compiled(model)
    if sharing_of(model.optimizer) is None and model.trainable_variables:
        _refuse_plain_optimizer(model)
    if keras.backend.backend() == "tensorflow" and model.jit_compile:
        # XLA has no kernel for Horovod's collectives; the rest of the step compiles with TF.
        if verbs.rank() == 0:
            logger.warning(
                "jit_compile is switched off for this model's steps: they hold collectives, "
                "which XLA cannot compile; they run as TensorFlow graphs"
            )
        model.jit_compile = False
        forget_compiled(model)


def forget_compiled(model: Any) -> None:
    """Have Keras make the functions of its steps anew."""
    model.train_function = None
    model.test_function = None
    model.predict_function = None


def _refuse_plain_optimizer(model: Any) -> None:
    message = (
        f"rank {verbs.rank()} of {verbs.size()}: the model's optimizer is a plain "
        f"{type(model.optimizer).__name__}, so each rank would train alone. Compile with "
        "hvd.distribute(optimizer) or hvd.DistributedOptimizer(optimizer); after loading a saved "
        "model use hvd.load_model(path), or compile it again"
    )
    own_step = getattr(type(model), "train_step", None) is not keras.Model.train_step
    if own_step:
        # A train_step of the user's own may reduce gradients itself, with a distributed tape.
        logger.debug("%s", message)
        return
    raise HvdsyncError(message)
