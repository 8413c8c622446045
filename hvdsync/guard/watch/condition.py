"""The condition on a rank under which a line is reached: a stack goes in, the condition comes out.

A collective under ``if rank() == 0:`` is one that the other ranks never call.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Sequence
from dataclasses import dataclass

from hvdsync.guard.watch.stacks import Frame, is_users

_ASK_RANK = ("rank", "local_rank", "cross_rank", "get_rank")
# One answer for all ranks, whatever each of them asked.
_AGREE = ("agree_any", "agree_all")


@dataclass(frozen=True)
class Condition:
    """A branch that only some ranks take: where it begins, and its text."""

    file: str
    line: int
    text: str


def rank_condition(stack: Sequence[Frame]) -> Condition | None:
    """The innermost condition on a rank around the lines of ``stack``, or None.

    Found are ``if``, ``while`` and conditional expressions whose test calls ``rank()`` or compares
    a name with "rank" in it, functions under ``rank_zero_only``, and bodies of ``rank_zero_first``.
    """
    called_by: Frame | None = None
    for frame in reversed(stack):
        if frame.function == "on_rank_zero" and frame.file.endswith("/comm/verbs.py"):
            called_by = frame
        elif is_users(frame):
            if called_by is not None:
                return Condition(frame.file, frame.line, f"rank_zero_only: {frame.code}")
            found = _around(frame)
            if found is not None:
                return found
    return None


def _around(frame: Frame) -> Condition | None:
    source = "".join(linecache.getlines(frame.file))
    try:
        nodes = [n for n in ast.walk(ast.parse(source)) if _spans(n, frame.line)]
    except (SyntaxError, ValueError):
        return None
    # A condition around a definition is none around its calls.
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    first = max((n.lineno for n in nodes if isinstance(n, functions)), default=0)
    lines = [n.lineno for n in nodes if _is_for_some_ranks(n, frame.line)]  # type: ignore[attr-defined]
    line = max(lines, default=0)
    if line < max(first, 1):
        return None
    return Condition(frame.file, line, linecache.getline(frame.file, line).strip())


def _spans(node: ast.AST, line: int) -> bool:
    first = getattr(node, "lineno", None)
    return first is not None and first <= line <= (getattr(node, "end_lineno", None) or first)


def _is_for_some_ranks(node: ast.AST, line: int) -> bool:
    if isinstance(node, ast.If | ast.While):
        inside = any(_spans(child, line) for child in (*node.body, *node.orelse))
        return inside and _asks_rank(node.test)
    if isinstance(node, ast.IfExp):
        return _asks_rank(node.test)
    if isinstance(node, ast.With):
        inside = any(_spans(child, line) for child in node.body)
        calls = (_calls(item.context_expr, ("rank_zero_first",)) for item in node.items)
        return inside and any(calls)
    return False


def _asks_rank(test: ast.AST) -> bool:
    if isinstance(test, ast.Call) and _name(test.func) in _AGREE:
        return False
    if isinstance(test, ast.Call) and _name(test.func) in _ASK_RANK:
        return True
    if isinstance(test, ast.Compare):
        parts = (test.left, *test.comparators)
        if any("rank" in _name(part).lower() for part in parts):
            return True
    return any(map(_asks_rank, ast.iter_child_nodes(test)))


def _calls(expression: ast.expr, names: Sequence[str]) -> bool:
    calls = (n for n in ast.walk(expression) if isinstance(n, ast.Call))
    return any(_name(call.func) in names for call in calls)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
