"""Python stacks of this process: frames of its threads go in, plain lines and verdicts come out."""

from __future__ import annotations

import gc
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hvdsync.guard.watch import threads

_MOST_FRAMES = 30
_MOST_THREADS = 5
# One at a time, so that nobody enables what another one has disabled.
_reading = threading.Lock()

_PACKAGE = str(Path(__file__).parents[2])
# Where a framework is while it compiles, or traces a function into a graph, and at no other time;
# and where Python is while it imports, which a first step may do for long on a crowded machine.
_COMPILERS = (
    "<frozen importlib._bootstrap>",
    "/torch/_dynamo/convert_frame.py",
    "/torch/_inductor/compile_fx.py",
    "/torch/export/",
    "/triton/compiler/",
    "/tensorflow/python/framework/func_graph.py",
    "/tensorflow/python/autograph/",
)


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def place(self) -> str:
        """Where it is, as editors take it."""
        return f"{self.file}:{self.line} in {self.function}"


def main_thread() -> list[Frame]:
    """The stack of the main thread, outermost frame first."""
    ident = threading.main_thread().ident
    return _stack(ident) if ident is not None else []


def other_threads() -> dict[str, list[Frame]]:
    """The stacks of other threads that run code of the user's, by the threads' names."""
    main = threading.main_thread()
    found = {}
    for thread in threading.enumerate():
        if thread is main or thread.name.startswith(threads.PREFIX) or thread.ident is None:
            continue
        stack = _stack(thread.ident)
        if any(map(is_users, stack)):
            found[thread.name] = stack
    return dict(list(found.items())[:_MOST_THREADS])


def _frames() -> dict[int, FrameType]:
    """The innermost frame of each thread, by the threads' idents.

    Where garbage is collected meanwhile CPython may stand still for ever (its issue 106883): it
    holds the list of threads then, and waits for another thread that wants to end or to begin.
    """
    with _reading:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if was_enabled:
                gc.enable()


def _stack(ident: int) -> list[Frame]:
    frame = _frames().get(ident)
    if frame is None:
        return []
    lines = traceback.extract_stack(frame)
    stack = [Frame(f.filename, f.lineno or 0, f.name, f.line or "") for f in lines]
    # Compilers are deep; the user's own lines are further out.
    return [*filter(is_users, stack[:-_MOST_FRAMES]), *stack[-_MOST_FRAMES:]]


def is_users(frame: Frame) -> bool:
    """Whether the code is neither a package's that is installed, nor Python's, nor ours."""
    libraries = (_PACKAGE, sysconfig.get_path("stdlib"), "<frozen", "<string>")
    return "-packages/" not in frame.file and not frame.file.startswith(libraries)


def users_frame(stack: Sequence[Frame]) -> Frame | None:
    """The innermost frame of the user's own code; the innermost of all where there is none."""
    own = [frame for frame in stack if is_users(frame)]
    return next(reversed(own or list(stack)), None)


def is_compiling(stack: Sequence[Frame]) -> bool:
    """Whether it imports, traces or compiles there, which may take minutes in a first step."""
    return any(part in frame.file for frame in stack for part in _COMPILERS)


def formatted(stack: Sequence[Frame], indent: str = "  ") -> str:
    """The stack as Python writes it, outermost frame first."""
    lines = []
    for frame in stack:
        lines.append(f'{indent}File "{frame.file}", line {frame.line}, in {frame.function}')
        if frame.code:
            lines.append(f"{indent}  {frame.code}")
    return "\n".join(lines)
