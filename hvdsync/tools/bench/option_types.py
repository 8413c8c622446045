"""Types of the options that benchmarks and the plan have in common: text in, values out."""

from __future__ import annotations

from typing import Any

import rich_click as click

from hvdsync.tools.bench import rates
from hvdsync.tools.bench.models import MODELS


class _Numbers(click.ParamType):
    """Whole numbers from 1 on, with commas between: in order, each once."""

    name = "n,n,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        numbers = [int(part) if part.strip().isdecimal() else 0 for part in value.split(",")]
        if min(numbers) < 1:
            self.fail(f"found {value!r}; expected whole numbers, as in 2,4,8", param, ctx)
        return tuple(sorted(set(numbers)))


class _Models(click.ParamType):
    """Names of models with commas between."""

    name = "name,name,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(part.strip() for part in value.split(","))
        if unknown := [name for name in names if name not in MODELS]:
            self.fail(
                f"there is no model {', '.join(unknown)}; there are {', '.join(MODELS)}", param, ctx
            )
        return names


class _Links(click.ParamType):
    """Rates of links in bits per second, None for loopback, with commas between."""

    name = "rate,rate,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float | None, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(rates.parse(part) for part in value.split(","))
        except ValueError as error:
            self.fail(str(error), param, ctx)


NUMBERS = _Numbers()
MODEL = click.Choice(list(MODELS))
MODEL_NAMES = _Models()
LINKS = _Links()
