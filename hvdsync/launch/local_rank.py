"""The process of one rank of ``hvdsync.run(on="local")``: a folder in, an outcome in it out."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from hvdsync.comm.launch import detect
from hvdsync.errors import LaunchError
from hvdsync.launch.call import Call, attempt
from hvdsync.launch.on_local import CALL, outcome_file


def main(folder: Path) -> None:
    """Make the call that is in ``folder`` on this rank, and leave its outcome there.

    What it raised is raised again, for the launcher and the other ranks to see.
    """
    launch = detect()
    if launch is None:
        raise LaunchError("hvdsync.launch.local_rank is started by hvdsync.run alone")
    call: Call = pickle.loads((folder / CALL).read_bytes())
    # In the place of the working folder, which Python has put first.
    sys.path[:] = list(call.path)
    outcome, error = attempt(call, launch.rank)
    target = outcome_file(folder, launch.rank)
    unfinished = target.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(outcome))
    unfinished.rename(target)
    if error is not None:
        raise error


if __name__ == "__main__":
    main(Path(sys.argv[1]))
