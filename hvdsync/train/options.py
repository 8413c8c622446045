"""The command line made from the fields of :class:`TrainConfig`: arguments in, a config out.

A YAML file may hold any of the options; click checks its values as if they had been typed.
"""

from __future__ import annotations

import math
import types
import typing
from dataclasses import Field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import rich_click as click
from click.core import ParameterSource

from hvdsync.sync.compression import parse as parse_compression
from hvdsync.train.config import OUTPUT, TrainConfig

NAMED_DATASETS = ("mnist", "synthetic")


def make_command() -> click.Command:
    """The command whose options are the fields of :class:`TrainConfig`, and that returns one."""

    hints = typing.get_type_hints(TrainConfig)
    options = [_option(f, hints[f.name]) for f in fields(TrainConfig)]
    groups: dict[str, list[str]] = {}
    for entry in fields(TrainConfig):
        groups.setdefault(entry.metadata["group"], []).append(flag(entry.name))
    groups[OUTPUT] += ["--config", "--help"]
    return click.RichCommand(
        name="train",
        callback=TrainConfig,
        params=[*options, _config_option()],
        help="Train on all workers of a launch: [b]horovodrun -np 4 python -m hvdsync.train[/]. "
        "Without a launcher it is one worker.",
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": 100,
            "rich_help_config": _looks(groups),
        },
    )


def flag(name: str) -> str:
    """The option of a field: ``batch_size`` is ``--batch-size``."""
    return "--" + name.replace("_", "-")


def explain(error: click.ClickException) -> str:
    """What was wrong with the arguments, in one sentence that names the file if it was in one."""
    message = " ".join(error.format_message().split())
    param, ctx = getattr(error, "param", None), getattr(error, "ctx", None)
    from_file = ParameterSource.DEFAULT_MAP
    if param and ctx and ctx.get_parameter_source(param.name) == from_file:
        message = f"{ctx.meta[_FILE]}: {message[0].lower()}{message[1:]}"
    return message


_FILE = "hvdsync.train.config_file"


def _looks(groups: dict[str, list[str]]) -> click.RichHelpConfiguration:
    return click.RichHelpConfiguration(
        text_markup="rich",
        option_groups={
            "*": [{"name": name, "options": members} for name, members in groups.items()]
        },
        style_options_panel_box="SIMPLE",
    )


class _WholeNumber(click.IntRange):
    """A whole number within limits."""

    name = "whole number"


class _Number(click.FloatRange):
    """A number within limits; infinity and NaN, which compare with nothing, are refused too."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


class _Dataset(click.ParamType):
    """The name of a data set, or a path that exists."""

    name = "name or path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value not in NAMED_DATASETS and not Path(value).expanduser().exists():
            names = ", ".join(NAMED_DATASETS)
            self.fail(f"'{value}' is none of {names}, and no such path exists.", param, ctx)
        return str(value)


class _Compression(click.ParamType):
    """A compressor's name, with its arguments."""

    name = "compression"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            parse_compression(str(value))
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)
        return str(value)


class _Minutes(_Number):
    """A time: minutes, or a number with the unit s, m, h or d."""

    name = "time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        unit = str(value)[-1:]
        if unit not in _MINUTES:
            return super().convert(value, param, ctx)
        return super().convert(str(value)[:-1], param, ctx) * _MINUTES[unit]


_MINUTES = {"s": 1 / 60, "m": 1, "h": 60, "d": 24 * 60}


def _option(entry: Field[Any], hint: Any) -> click.Option:
    about = entry.metadata
    hint = _without_none(hint)
    declarations = [entry.name, flag(entry.name)]
    if hint is bool:
        declarations[-1] += f"/--no-{entry.name.replace('_', '-')}"
    return click.RichOption(
        declarations,
        type=_type(entry, hint),
        default=entry.default,
        help=about["help"],
        metavar=about["metavar"] or ("N" if hint in (int, float) else None),
        show_default=about["shown_default"] or hint is not bool,
    )


def _without_none(hint: Any) -> Any:
    """The type in "Path | None", whose None is only the default."""
    if not isinstance(hint, types.UnionType):
        return hint
    (only,) = (member for member in typing.get_args(hint) if member is not type(None))
    return only


def _type(entry: Field[Any], hint: Any) -> click.ParamType:
    if entry.name == "dataset":
        return _Dataset()
    if entry.name == "compression":
        return _Compression()
    if typing.get_origin(hint) is typing.Literal:
        return click.Choice(typing.get_args(hint))
    minimum, above, below = (entry.metadata[limit] for limit in ("minimum", "above", "below"))
    if hint is int:
        return _WholeNumber(min=int(minimum), max=below, max_open=below is not None)
    if hint is float:
        kind = _Minutes if entry.name == "max_time" else _Number
        lowest = minimum if above is None else above
        return kind(lowest, below, min_open=above is not None, max_open=below is not None)
    if hint is Path:
        return click.Path(file_okay=False, path_type=Path)
    return click.BOOL


def _config_option() -> click.Option:
    return click.RichOption(
        ["--config"],
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE.yaml",
        is_eager=True,
        expose_value=False,
        callback=_read_config,
        help="A file with any of these options, such as [b]batch-size: 128[/]; options given here "
        "win.",
    )


def _read_config(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    if path is None:
        return
    import yaml

    try:
        # Every value stays the text that it is in the file: click then reads "1e-3", "true" or
        # "3.5" as it would from the command line, where YAML's own guesses are others.
        content = yaml.load(path.read_text(), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise click.UsageError(f"{path} cannot be read: {error}", ctx) from error
    if content in (None, ""):
        content = {}
    if not isinstance(content, dict):
        raise click.UsageError(f"{path}: expected lines like 'epochs: 3'", ctx)
    known = [entry.name for entry in fields(TrainConfig)]
    values = {}
    for key, value in content.items():
        name = key.replace("-", "_") if isinstance(key, str) else ""
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"; did you mean '{near[0].replace('_', '-')}'?" if near else ""
            raise click.UsageError(f"{path}: unknown option '{key}'{hint}", ctx)
        if not isinstance(value, str):
            raise click.UsageError(f"{path}: '{key}' must be a single value", ctx)
        values[name] = value
    ctx.meta[_FILE] = path
    ctx.default_map = values
