"""Every error that users may catch, all under :class:`HvdsyncError`.

Each message says which rank, tensor or file, what was found, what was expected, and what to do.
"""


class HvdsyncError(Exception):
    """Base of all errors that hvdsync raises on purpose."""


class LaunchError(HvdsyncError):
    """The launcher, the environment and the running ranks do not fit together."""


class RankMismatch(HvdsyncError):
    """Ranks were given different things (names, shapes, counts) where they must be equal."""


class ReplicaMismatch(HvdsyncError):
    """Model or optimizer state differs between ranks that should hold the same values."""


class NonFiniteGradient(HvdsyncError):
    """A gradient or loss is NaN or infinite on at least one rank."""


class SilentCorruption(HvdsyncError):
    """A rank computes wrong numbers: from equal weights and the same batch it gets others."""


class StalledRank(HvdsyncError):
    """A collective operation waited longer than its limit for a rank that did not come.

    ``report`` is what every rank has logged: which tensors wait, for whom, and all ranks' stacks.
    """

    report = ""


class RankFailed(HvdsyncError):
    """Another rank raised, died or finished while this one needed it; the message says which."""


class RunFailed(HvdsyncError):
    """A function that :func:`hvdsync.run` started failed: the message is its rank's traceback.

    ``rank`` failed first (None: which is not known), and what it raised is the error's cause;
    ``exceptions`` has what each rank raised, where it could be sent back.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.rank: int | None = None
        self.exceptions: dict[int, BaseException] = {}


class CheckpointError(HvdsyncError):
    """A checkpoint could not be written, verified or restored."""


class DataError(HvdsyncError):
    """A data set is missing, damaged, or not of the expected shape or type."""


class BuildError(HvdsyncError):
    """Horovod could not be built or patched."""


class HorovodMissing(HvdsyncError, ImportError):
    """Horovod, or its extension for the wanted framework, is not installed."""
