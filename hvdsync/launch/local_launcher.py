"""``horovodrun`` for ``hvdsync.run``: its own command line, ended when the caller is gone.

In: arguments of ``horovodrun``, and a stdin that the caller holds open. Out: its exit code.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def main() -> None:
    """Run the launcher; end its ranks when stdin ends, as it does when the caller dies."""
    line = os.dup(0)  # not inherited by ranks
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    threading.Thread(target=_end_with_caller, args=(line,), daemon=True).start()

    from horovod.runner.launch import run_commandline

    sys.argv[0] = "horovodrun"
    run_commandline()


def _end_with_caller(line: int) -> None:
    while os.read(line, 1):
        pass
    # Nobody reads any more, and what is said on the way to the ranks must not fail.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
