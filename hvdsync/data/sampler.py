"""In: the number of samples, a seed, and where this process stands in the world. Out: the indices
that this rank reads, epoch after epoch, and a state that resumes at any world size."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

from hvdsync.comm.comparison import note
from hvdsync.data.order import Indices, Uneven, advance, global_order, share, share_size
from hvdsync.errors import DataError

logger = logging.getLogger(__name__)

_VERSION = 1


@dataclass
class _Pass:
    """One reading of (the rest of) an epoch by this rank."""

    epoch: int
    start: int  # cursor at which it began
    size: int
    count: int  # samples that this rank reads in it
    given: int = 0


class DistributedSampler:
    """Which samples this rank reads: one global order per (seed, epoch), dealt out in turn.

    ``data`` is the number of samples or anything with a length. Iterating gives int indices; a
    PyTorch ``DataLoader`` takes the object as ``sampler=``; ``epoch_batches`` gives index arrays to
    NumPy, TensorFlow and Keras loops. All ranks must be given the same length, ``shuffle``,
    ``seed`` and ``uneven``; nothing travels between them. ``distribute`` and Keras's ``fit``
    compare the lengths and seeds of the shuffled samplers that were made before.

    ``uneven`` says what happens when the length does not divide by the world size: "pad" reads some
    samples twice so that all ranks have equally many, "drop" leaves up to size-1 samples out of the
    epoch, "exact" reads each sample once, so that some ranks have one more (for evaluation). Rank 0
    logs which it was.

    **Epochs.** Each iteration reads the next epoch, in a new order, from 0 on; no ``set_epoch`` is
    needed, whether or not the one before was read to its end. An epoch begins when its first index
    is asked for. ``set_epoch`` pins the next iteration's epoch. After ``load_state_dict`` the next
    iteration reads the rest of the saved epoch, and the one after it the following epoch.

    **World.** ``rank`` and ``size`` (or ``num_replicas``, PyTorch's name for it) are those of
    ``init()``, looked up each time an epoch begins, so that an elastic job needs no new sampler.

    Raises ``DataError`` for arguments that make no sense. Stands for PyTorch's
    ``torch.utils.data.distributed.DistributedSampler`` and Horovod's ``ElasticSampler``.
    """

    def __init__(
        self,
        data: int | Sized,
        shuffle: bool = True,
        seed: int = 0,
        uneven: Uneven = "pad",
        *,
        rank: int | None = None,
        size: int | None = None,
        num_replicas: int | None = None,
    ) -> None:
        if num_replicas is not None:
            if size is not None and size != num_replicas:
                raise DataError(f"found size={size} and num_replicas={num_replicas}: give one")
            size = num_replicas
        if (rank is None) != (size is None):
            raise DataError(f"found rank={rank} and size={size}, expected both or neither")
        if not isinstance(shuffle, bool):
            raise DataError(f"found shuffle={shuffle!r}, expected True or False")
        self.length = whole("length", len(data) if isinstance(data, Sized) else data)
        if self.length == 0:
            raise DataError("found a data set of 0 samples, expected at least 1")
        self.shuffle = shuffle
        self.seed = whole("seed", seed)
        self.uneven: Uneven = uneven
        self._fixed = None if rank is None or size is None else (rank, size)
        self._next_epoch = 0
        self._next_cursor = 0
        self._pass: _Pass | None = None
        self._logged: tuple[int, int] | None = None
        share_size(self.length, 0, *(self._fixed or (0, 1)), uneven)
        if shuffle and self._fixed is None:
            # Another order on another rank reads samples twice and others never.
            note("samples and seed of the data order", f"{self.length} by seed {self.seed}")

    def __iter__(self) -> Iterator[int]:
        # A generator: loaders that make an iterator and drop it must not use up an epoch.
        now, indices = self._begin()
        for index in indices.tolist():
            now.given += 1
            yield index

    def epoch_batches(self, batch_size: int, drop_last: bool = False) -> Iterator[Indices]:
        """The next epoch as index arrays, int64 (batch_size,); the last one may be shorter.

        Counts as an iteration. ``drop_last`` leaves a shorter last batch out.
        """
        if batch_size < 1:
            raise DataError(f"found batch_size={batch_size}, expected at least 1")
        now, indices = self._begin()
        end = len(indices) - (len(indices) % batch_size if drop_last else 0)
        for first in range(0, end, batch_size):
            last = first + batch_size >= end
            # What is dropped counts as read: the epoch ends with its last batch.
            now.given = now.count if last else first + batch_size
            yield indices[first : first + batch_size]
        now.given = now.count

    def __len__(self) -> int:
        """Samples of this rank in the iteration under way, or in the next one if none is."""
        if self._pass is not None and self._pass.given < self._pass.count:
            return self._pass.count
        return share_size(self.length, self._next_cursor, *self._place(), self.uneven)

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one once all indices of this one were given out."""
        return int(self.state_dict()["epoch"])

    def set_epoch(self, epoch: int) -> None:
        """Makes ``epoch`` the one that the next iteration reads.

        After ``load_state_dict``, naming the saved epoch keeps the place in it; any other epoch is
        read from its beginning.
        """
        epoch = whole("epoch", epoch)
        if epoch != self._next_epoch:
            self._next_epoch, self._next_cursor = epoch, 0
        self._pass = None

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Where the epoch stands, as plain values that any format can hold.

        ``consumed`` is how many samples this rank has really trained on since the iteration under
        way began. Without it all that were given out count, which is too many while a loader that
        reads ahead is at work, and right when the loop over it has ended. The cursor counts what
        all ranks together have consumed, assuming as many on each; rank 0 never has fewer than
        others, so its state is the one to keep. When this rank's share is consumed, the state is
        the beginning of the next epoch. Raises ``DataError`` if ``consumed`` is more than was
        given out.
        """
        epoch, cursor = self._next_epoch, self._next_cursor
        now = self._pass
        given = 0 if now is None else now.given
        consumed = given if consumed is None else whole("consumed", consumed)
        if consumed > given:
            raise DataError(
                f"found consumed={consumed}, expected at most {given}, the samples that this "
                f"iteration gave out"
            )
        if now is not None and consumed < now.count:
            epoch, cursor = now.epoch, advance(self.length, now.start, consumed, now.size)
        return {
            "version": _VERSION,
            "length": self.length,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "uneven": self.uneven,
            "epoch": epoch,
            "cursor": cursor,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up the epoch of ``state`` at its cursor, at whatever world size this is now.

        Each sample that the saved run had not consumed is read once ("pad" and "drop" then apply
        to that rest). Raises ``DataError`` when the state is of another length, seed, shuffle or
        layout: the cursor would mean other samples. ``uneven`` may differ: this sampler's holds.
        """
        lacking = {"version", "length", "shuffle", "seed", "epoch", "cursor"} - set(state)
        if lacking:
            raise DataError(f"sampler state: no {', '.join(sorted(lacking))} in {sorted(state)}")
        for key, expected in (
            ("version", _VERSION),
            ("length", self.length),
            ("shuffle", self.shuffle),
            ("seed", self.seed),
        ):
            if state[key] != expected:
                raise DataError(
                    f"sampler state: found {key} {state[key]!r}, expected {expected!r} as in this "
                    f"sampler; resume with the data and arguments of the saved run, or start anew"
                )
        epoch, cursor = whole("epoch", state["epoch"]), whole("cursor", state["cursor"])
        share_size(self.length, cursor, 0, 1)
        if state.get("uneven", self.uneven) != self.uneven:
            logger.info(
                "sampler: saved with uneven=%s, goes on with %s", state["uneven"], self.uneven
            )
        if cursor == self.length:
            epoch, cursor = epoch + 1, 0
        self._next_epoch, self._next_cursor = epoch, cursor
        self._pass = None

    def _place(self) -> tuple[int, int]:
        if self._fixed is not None:
            return self._fixed
        from hvdsync.comm import world

        here = world.current()
        return here.rank, here.size

    def _begin(self) -> tuple[_Pass, Indices]:
        rank, size = self._place()
        epoch, cursor = self._next_epoch, self._next_cursor
        positions = share(self.length, cursor, rank, size, self.uneven)
        if rank == 0:
            self._log_uneven(self.length - cursor, size)
        now = _Pass(epoch, cursor, size, len(positions))
        self._pass, self._next_epoch, self._next_cursor = now, epoch + 1, 0
        return now, global_order(self.length, self.seed, epoch, self.shuffle)[positions]

    def _log_uneven(self, rest: int, size: int) -> None:
        if rest % size == 0 or self._logged == (rest, size):
            return
        self._logged = (rest, size)
        outcome = {
            "pad": f"{-rest % size} of them are read twice",
            "drop": f"{rest % size} of them are not read in this epoch",
            "exact": f"{rest % size} ranks read one more than the others",
        }[self.uneven]
        level = logging.WARNING if self.uneven == "drop" and rest < size else logging.INFO
        logger.log(level, "%d samples on %d ranks, uneven=%s: %s", rest, size, self.uneven, outcome)


def whole(name: str, value: Any) -> int:
    """``value`` as an int of 0 or more. Raises ``DataError`` that names it for anything else."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise DataError(f"found {name}={value!r}, expected a whole number") from error
    if number < 0:
        raise DataError(f"found {name}={number}, expected 0 or more")
    return number
