"""Data-parallel training over Horovod for TensorFlow, Keras 3 and PyTorch.

Importing this package loads no framework; users import a front door instead:
``hvdsync.torch``, ``hvdsync.tensorflow`` or ``hvdsync.keras``. ``hvdsync.run`` starts a function on
several ranks.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdsync.launch.run import run

__all__ = ["__version__", "run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: it is of no use on a rank.
    if name == "run":
        from hvdsync.launch.run import run

        return run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
