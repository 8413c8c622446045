"""Scripts that tests run in a process of their own, outside the launch."""

import os
import subprocess
import sys
import textwrap

_BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hvdsync", "horovod"):
            raise ImportError(name)

sys.meta_path.insert(0, Blocker())
"""


def alone(script, *arguments):
    """The output of a process without a launcher."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD", "OMPI", "PMIX"))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_hvdsync(script, *arguments):
    """As ``alone``, where neither hvdsync nor Horovod can be imported."""
    return alone(_BLOCKER + textwrap.dedent(script), *arguments)
