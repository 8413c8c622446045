"""In: argument lists. Out: proof of exit codes, of one-sentence errors and of a light start."""

from __future__ import annotations

import subprocess
import sys

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
