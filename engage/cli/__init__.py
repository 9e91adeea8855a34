# SPDX-License-Identifier: Apache-2.0
"""The command line: one file per command, put together here."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

import engage
from engage.api import EngageError
from engage.cli.check import check
from engage.cli.common import Failed, registry_of
from engage.cli.copy import copy
from engage.cli.export import export
from engage.cli.init import init
from engage.cli.plugins import plugins
from engage.cli.serve import serve
from engage.cli.webhooks import webhook_retry, webhook_test, webhook_url

__all__ = ["main"]


class Root(click.Group):
    """The built-in commands and those of plugins; any failure becomes one line and exit 1."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Look a command up; plugins are only asked for what is not built in."""
        command = super().get_command(ctx, cmd_name)
        if command is None:
            command = registry_of(ctx).commands.get(cmd_name)
        return command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """:return: all names; ``--help`` works also with a broken plugin, and says that it is."""
        names = super().list_commands(ctx)
        try:
            names += registry_of(ctx).commands
        except EngageError as error:
            Failed(error).show()
        return sorted(names)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # whoever read our output has seen enough: click ends quietly
        except (EngageError, OSError) as error:
            _let_go_of_output()
            raise Failed(error) from error


def _let_go_of_output() -> None:
    """What cannot be written now must not fail once more when Python ends, with status 120."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(
    cls=Root,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="\b\nExample:\n  engage init && engage serve",
)
@click.version_option(engage.__version__, prog_name="engage")
@click.pass_context
def main(ctx: click.Context) -> None:
    """A self-hosted event-ingestion server."""
    ctx.obj = None
    if sys.stdout is None and ctx.invoked_subcommand != serve.name:
        raise EngageError("standard output is closed")


_COMMANDS = (
    check,
    copy,
    export,
    init,
    plugins,
    serve,
    webhook_retry,
    webhook_test,
    webhook_url,
)
for _command in _COMMANDS:
    main.add_command(_command)
