"""In: argument lists. Out: proof of exit codes, of one-sentence errors and of a light start."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import rich_click as click

from hvdsync.errors import BuildError
from hvdsync.tools import cli


def _code(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as end:
        cli.main(list(arguments))
    return end.value.code


def test_every_command_can_be_imported_and_has_one_line_of_help() -> None:
    context = click.Context(cli.cli)
    for name in cli.COMMANDS:
        command = cli.cli.get_command(context, name)
        assert command is not None and command.get_short_help_str()


def _commands(command: click.Command, *path: str) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            member = command.get_command(context, name)
            assert member is not None
            yield from _commands(member, *path, name)


def test_help_of_every_command_shows_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    every = list(_commands(cli.cli))
    assert ("bench", "link") in every
    for path in every:
        assert _code(*path, "--help") == 0
        said = capsys.readouterr().out
        assert "Usage:" in said
        assert not re.search(r"\[/|\[b\]", said), said


def test_help_says_what_counts_where_nothing_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert _code("checkpoint", "show", "--help") == 0
    assert "[default: (the one written last)]" in capsys.readouterr().out


def test_help_imports_no_framework() -> None:
    code = (
        "import sys\n"
        "from hvdsync.tools.cli import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'tensorflow', 'keras', 'horovod', 'mpi4py'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    "arguments", [["no-such-command"], ["doctor", "--nonsense"], ["build-horovod", "--gpu", "amd"]]
)
def test_wrong_usage_ends_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _code(*arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_error_of_ours_is_one_message_and_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(**_: object) -> None:
        raise BuildError("No C++ compiler is found.")

    monkeypatch.setattr("hvdsync.tools.build_horovod.build_horovod", fails)
    assert _code("build-horovod") == 1
    assert capsys.readouterr().err.strip() == "Error: No C++ compiler is found."
