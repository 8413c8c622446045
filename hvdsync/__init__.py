"""Data-parallel training over Horovod for TensorFlow, Keras 3 and PyTorch.

Importing this package loads no framework; users import a front door instead:
``hvdsync.torch``, ``hvdsync.tensorflow`` or ``hvdsync.keras``.
"""

__version__ = "0.1.0"
