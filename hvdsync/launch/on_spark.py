"""Ranks as tasks of a Spark job, through ``horovod.spark``: a call in, each rank's outcome out."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from hvdsync.comm.launch_failure import KEPT_LINES, last_words
from hvdsync.errors import LaunchError, RunFailed
from hvdsync.launch.call import Call, Outcome, attempt
from hvdsync.launch.options import Options

# As Horovod marks the lines of ranks, and says which of them it ended the job for.
_LINE = re.compile(r"\[(?P<rank>\d+)\]<stderr>:(?P<text>.*)")
_FIRST = re.compile(r"Process name: .*?(?P<rank>\d+)\s*Exit code: (?P<code>-?\d+)")


def start(call: Call, options: Options) -> list[Outcome]:
    """Run the call on all ranks; what they write is written to this process's own streams.

    Each task has one rank; Horovod waits until Spark has started all of them, so that the job needs
    as many free task slots as there are ranks, and no barrier.
    """
    context = _context()
    _check_executors(context)
    import horovod.spark

    errors = _Lines(sys.stderr)
    given: dict[str, Any] = {
        "args": (call,),
        "num_proc": options.np,
        "start_timeout": options.start_timeout_seconds,
        "stdout": sys.stdout,
        "stderr": errors,
        "verbose": 0,
    }
    try:
        with _signal_handlers_kept():
            if options.elastic:
                given |= {"min_num_proc": options.min_np, "max_num_proc": options.max_np}
                return list(horovod.spark.run_elastic(_on_elastic_rank, **given))
            given |= {"use_gloo": True, "executable": context.pythonExec}
            return list(horovod.spark.run(_on_rank, **given))
    except RuntimeError as error:
        found = _FIRST.search(str(error))
        if found is None:
            raise LaunchError(f"hvdsync.run: Spark did not run all ranks: {error}") from error
        rank = int(found["rank"])
        words = "\n".join(last_words(errors.of(rank))) or "it wrote nothing to its stderr"
        failed = RunFailed(
            f"rank {rank} of {options.np} ended with exit code {found['code']}; its last words:\n"
            f"{words}"
        )
        failed.rank = rank
        raise failed from None


def _on_rank(call: Call) -> Outcome:
    from hvdsync.guard.watch import watch

    outcome, error = attempt(call, int(os.environ["HOROVOD_RANK"]))
    if error is not None:
        if not watch.is_active():
            raise error  # nobody else would tell the other ranks
        watch.fail(error)
    return outcome


def _on_elastic_rank(call: Call) -> Outcome:
    outcome, error = attempt(call, int(os.environ["HOROVOD_RANK"]))
    if error is not None:
        raise error  # for the launcher, which may start another in its place
    return outcome


def _context() -> Any:
    for package in ("pyspark", "pyarrow", "horovod"):
        if importlib.util.find_spec(package) is None:
            raise LaunchError(
                f"hvdsync.run(on='spark') needs {package}, which is not installed; run "
                '`pip install "hvdsync[spark]"` and `python -m hvdsync build-horovod`'
            )
    from pyspark.sql import SparkSession

    session = SparkSession.getActiveSession()
    if session is None:
        java = "" if _has_java() else "Spark needs Java 17 or newer, and there is none here. "
        raise LaunchError(
            "hvdsync.run(on='spark') runs inside a SparkSession, and this process has none. "
            f"{java}Make one first: SparkSession.builder.getOrCreate()"
        )
    try:
        return session.sparkContext
    except Exception as error:  # a session of Spark Connect has no context, and says so
        raise LaunchError(
            f"hvdsync.run(on='spark') needs a classic SparkSession, found one of Spark Connect "
            f"({type(session).__module__}): start the driver on the cluster, with spark-submit"
        ) from error


def _has_java() -> bool:
    return bool(os.environ.get("JAVA_HOME")) or shutil.which("java") is not None


def _check_executors(context: Any) -> None:
    """Raise ``LaunchError`` when the Python of Spark's tasks lacks what a rank needs."""

    # Inside, and with its own imports, so that it travels by value.
    def look(_: int) -> tuple[str, list[str]]:
        import importlib.util
        import sys

        wanted = ("hvdsync", "horovod", "pyspark", "pyarrow")
        return sys.executable, [name for name in wanted if importlib.util.find_spec(name) is None]

    executable, missing = context.range(1, numSlices=1).map(look).collect()[0]
    if missing:
        raise LaunchError(
            f"hvdsync.run(on='spark'): the Python of Spark's tasks, {executable}, has no "
            f"{', '.join(missing)}; start the session with PYSPARK_PYTHON set to one that has, as "
            f"the driver's own: {sys.executable}"
        )


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Horovod's launcher puts its own handlers into the place of the caller's."""
    if threading.current_thread() is not threading.main_thread():
        raise LaunchError("hvdsync.run(on='spark') is called from the main thread alone")
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


class _Lines:
    """Passes lines of ranks on, and keeps the last ones of each."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._kept: defaultdict[int, deque[str]] = defaultdict(lambda: deque(maxlen=KEPT_LINES))

    def write(self, text: str) -> None:
        for line in text.splitlines():
            if match := _LINE.match(line):
                self._kept[int(match["rank"])].append(match["text"])
        self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()

    def of(self, rank: int) -> list[str]:
        return list(self._kept[rank])
