"""The command line ``python -m hvdsync``: finds the asked-for command and runs it.

In: argv. Out: exit code 0; 1 with one message for an :class:`HvdsyncError`; 2 for wrong usage.
"""

from __future__ import annotations

import importlib
import sys
from typing import NoReturn

import rich_click as click

from hvdsync import __version__
from hvdsync.errors import HvdsyncError

#: Command name to "module:attribute". A module is imported only when its command, or the list of
#: all commands with their one-line help, is asked for.
COMMANDS = {
    "build-horovod": "hvdsync.tools.build_horovod:command",
    "doctor": "hvdsync.tools.doctor:command",
    "data": "hvdsync.tools.data:command",
    "checkpoint": "hvdsync.tools.checkpoint:command",
    "bench": "hvdsync.tools.bench:command",
    "plan": "hvdsync.tools.plan:command",
}


class LazyGroup(click.RichGroup):
    """A command group whose members are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all commands, in the order of :data:`COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, or None, which click turns into a usage error."""
        target = COMMANDS.get(cmd_name)
        if target is None:
            return None
        module, _, attribute = target.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="hvdsync")
@click.rich_config({"text_markup": "rich"})
def cli() -> None:
    """Data-parallel training over Horovod for TensorFlow, Keras 3 and PyTorch."""


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line and end the process.

    ``argv`` are the arguments without the program's name; None takes them from the process.
    """
    try:
        code = cli.main(args=argv, prog_name="python -m hvdsync", standalone_mode=False)
    except HvdsyncError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Stopped.", err=True)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)
