"""Ranks on this machine under ``horovodrun``: a call in, each rank's outcome out.

The launcher is a process of its own, so that signals, threads and modules of the caller, which may
be a notebook, stay as they are. Calls and outcomes are files in a private folder.
"""

from __future__ import annotations

import importlib.util
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from hvdsync.errors import HorovodMissing, LaunchError, RunFailed
from hvdsync.launch.call import Call, Outcome, raise_for
from hvdsync.launch.options import Options

CALL = "call"
#: As :mod:`hvdsync.comm.launch_failure` begins the launcher's last words.
_LAST_WORDS = ("horovodrun: rank ", "horovodrun: mpirun failed")
_KEPT_LINES = 30


def start(call: Call, options: Options) -> list[Outcome]:
    """Run the call on all ranks; what they write is written to this process's own streams.

    An interrupt (SIGINT) reaches the ranks as SIGTERM, so that they may save and end well; a second
    one ends them at once.
    """
    if importlib.util.find_spec("horovod") is None:
        raise HorovodMissing(
            "hvdsync.run needs Horovod, which is not installed; run `python -m hvdsync "
            "build-horovod` to build and install it"
        )
    with tempfile.TemporaryDirectory(prefix="hvdsync-run-") as name:
        folder = Path(name)
        (folder / CALL).write_bytes(pickle.dumps(call))
        with subprocess.Popen(
            _command(folder, options),
            env={**os.environ, **call.environ, "PYTHONPATH": _import_path()},
            stdin=subprocess.PIPE,  # open for as long as this process lives
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            words = _attend(process)
        return _collect(folder, process.returncode, words, options.np)


def _command(folder: Path, options: Options) -> list[str]:
    launcher = [sys.executable, "-m", "hvdsync.launch.local_launcher"]
    how = ["--mpi" if options.over == "mpi" else "--gloo", "-np", str(options.np)]
    if options.start_timeout_seconds is not None:
        how += ["--start-timeout", str(options.start_timeout_seconds)]
    return [*launcher, *how, sys.executable, "-m", "hvdsync.launch.local_rank", str(folder)]


def _import_path() -> str:
    # A notebook may have reached this package through sys.path alone.
    return os.pathsep.join(path for path in sys.path if path and os.path.exists(path))


def _attend(process: subprocess.Popen[str]) -> list[str]:
    """Pass the launcher's output on until it ends; gives its last words, which are kept back."""
    assert process.stdout is not None and process.stderr is not None
    lines: queue.SimpleQueue[tuple[bool, str] | None] = queue.SimpleQueue()
    for stream, is_error in ((process.stdout, False), (process.stderr, True)):
        threading.Thread(target=_read, args=(stream, is_error, lines), daemon=True).start()
    words: list[str] = []
    interrupted = False
    left = 2
    while left:
        try:
            item = lines.get()
        except KeyboardInterrupt:
            process.terminate()
            interrupted = True
            continue
        if item is None:
            left -= 1
            continue
        is_error, line = item
        if is_error and (words or line.startswith(_LAST_WORDS)):
            words.append(line.rstrip())
            continue
        target = sys.stderr if is_error else sys.stdout
        target.write(line)
        target.flush()
    process.wait()
    if interrupted:
        raise KeyboardInterrupt
    return words


def _read(
    stream: TextIO, is_error: bool, lines: queue.SimpleQueue[tuple[bool, str] | None]
) -> None:
    for line in stream:
        lines.put((is_error, line))
    lines.put(None)


def _collect(folder: Path, exit_code: int, words: list[str], size: int) -> list[Outcome]:
    outcomes = list(_outcomes(folder, size))
    if exit_code == 0 and len(outcomes) == size:
        return outcomes
    raise_for(outcomes, size)
    if words:
        raise RunFailed("\n".join(words))
    missing = sorted(set(range(size)) - {outcome.rank for outcome in outcomes})
    raise LaunchError(
        f"hvdsync.run: the launcher ended with exit code {exit_code}, and there is no result of "
        f"rank(s) {', '.join(map(str, missing))} of {size}; its output above says why"
    )


def _outcomes(folder: Path, size: int) -> Iterator[Outcome]:
    for rank in range(size):
        # A rank that was killed while it wrote has left half a file under another name.
        with suppress(FileNotFoundError):
            yield pickle.loads(outcome_file(folder, rank).read_bytes())


def outcome_file(folder: Path, rank: int) -> Path:
    """Where a rank leaves its outcome."""
    return folder / f"outcome-{rank}"
