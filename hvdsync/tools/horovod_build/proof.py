"""Proof that an installed Horovod works: two ranks, one all-reduce per framework.

In: the environment as it is installed. Out: nothing, or a :class:`BuildError` with what was said.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hvdsync.errors import BuildError

_SCRIPTS = {
    "torch": """
import torch
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.full((5,), float(hvd.rank() + 1)), op=hvd.Sum, name="proof")
assert hvd.size() == 2 and total.tolist() == [3.0] * 5, (hvd.size(), total)
""",
    "tensorflow": """
import tensorflow as tf
import horovod.tensorflow as hvd
hvd.init()
total = hvd.allreduce(tf.fill((5,), float(hvd.rank() + 1)), op=hvd.Sum, name="proof")
assert hvd.size() == 2 and total.numpy().tolist() == [3.0] * 5, (hvd.size(), total)
""",
}
_LIMIT_SECONDS = 300


def prove(framework: str) -> None:
    """Sum ones and twos over two ranks under this environment's ``horovodrun``.

    Raises :class:`BuildError` with the end of the output when that does not give threes.
    """
    bin_folder = Path(sys.executable).parent
    launcher = bin_folder / "horovodrun"
    command = [sys.executable, str(launcher), "--gloo", "-np", "2"]
    command += [sys.executable, "-c", _SCRIPTS[framework]]
    path = os.pathsep.join([str(bin_folder), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        result = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise BuildError(
            f"Horovod for {framework} is installed, but two ranks did not finish one all-reduce "
            f"within {_LIMIT_SECONDS} s. Is a firewall between this machine and itself?"
        ) from None
    if result.returncode:
        tail = "\n".join(result.stdout.strip().splitlines()[-15:])
        raise BuildError(
            f"Horovod for {framework} is installed, but an all-reduce over two ranks failed "
            f"(exit code {result.returncode}):\n{tail}"
        )
