"""Types of the options that benchmarks and the plan have in common: text in, values out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import rich_click as click

from hvdsync.tools.bench import rates
from hvdsync.tools.bench.models import MODELS


class _List(click.ParamType):
    """Values with commas between; ``read`` gives all of them, or raises ``ValueError``."""

    def __init__(self, name: str, read: Callable[[str], tuple[Any, ...]]) -> None:
        self.name = name
        self._read = read

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        if isinstance(value, tuple):  # converted before
            return value
        try:
            return self._read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _numbers(text: str) -> tuple[int, ...]:
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise ValueError(f"found {text!r}; expected whole numbers, as in 2,4,8")
    return tuple(sorted(set(numbers)))


def _models(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if unknown := [name for name in names if name not in MODELS]:
        raise ValueError(f"there is no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
    return names


def _links(text: str) -> tuple[float | None, ...]:
    return tuple(rates.parse(part) for part in text.split(","))


#: Whole numbers from 1 on: in order, each once.
NUMBERS = _List("n,n,...", _numbers)
MODEL = click.Choice(list(MODELS))
MODEL_NAMES = _List("name,name,...", _models)
#: Rates of links in bits per second, None for loopback.
LINKS = _List("rate,rate,...", _links)
