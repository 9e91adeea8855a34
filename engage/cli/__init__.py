# SPDX-License-Identifier: Apache-2.0
"""The command line.

====================  ==============================================================================
``serve.py``          ``engage serve``
``load.py``           ``engage load``
``init.py``           ``engage init``
``check.py``          ``engage check``
``verify.py``         ``engage verify``
``export.py``         ``engage export``
``copy.py``           ``engage copy``, ``backup`` and ``restore``
``tail.py``           ``engage tail``
``console.py``        ``engage console``, ``console-link``, ``console-logout``, ``console-password``
``dead_letters.py``   ``engage dead-letters list``, ``show``, ``delete``, ``check`` and ``replay``
``users.py``          ``engage users show``, ``remove-trait``, ``unlink`` and ``link``
``subscriptions.py``  ``engage subscriptions import`` and ``export``, ``engage subscription-link``
``suppressions.py``   ``engage suppressions list``, ``check`` and ``remove``
``erase.py``          ``engage erase``, ``erase user`` and ``erase requests``
``keys.py``           ``engage keys list``, ``add``, ``disable``, ``enable`` and ``archive``
``webhooks.py``       ``engage webhook-url``, ``webhook-test`` and ``webhook-retry``
``instance.py``       what a command works on: the config, the plugins, the store; shared options
``output.py``         what commands print: tables, JSON, a progress bar, why they failed
====================  ==============================================================================
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import click

import engage
from engage.api import EngageError
from engage.cli.check import check, plugins
from engage.cli.console import console, console_link, console_logout, console_password
from engage.cli.copy import backup, copy, restore
from engage.cli.dead_letters import dead_letters
from engage.cli.erase import erase
from engage.cli.export import export
from engage.cli.init import init
from engage.cli.instance import example, registry_of
from engage.cli.keys import keys
from engage.cli.load import load_command
from engage.cli.output import CommandFailed, discard_output
from engage.cli.serve import serve
from engage.cli.subscriptions import subscription_link, subscriptions
from engage.cli.suppressions import suppressions
from engage.cli.tail import tail
from engage.cli.users import users
from engage.cli.verify import verify
from engage.cli.webhooks import webhook_retry, webhook_test, webhook_url

__all__ = ["main"]


#: The commands as ``--help`` lists them.
GROUPS: Final[Mapping[str, Sequence[click.Command]]] = {
    "Set up and run": (init, check, verify, serve, load_command, console, plugins),
    "Events and users": (
        *(tail, export, copy, backup, restore),
        *(users, erase, subscriptions, suppressions, dead_letters),
    ),
    "Keys, webhooks and sign-in": (
        *(keys, subscription_link, webhook_url, webhook_test, webhook_retry),
        *(console_link, console_logout, console_password),
    ),
}


class Root(click.Group):
    """The commands of engage and of plugins. Any failure is reported in one line, with exit 1."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command. Plugins are only loaded for a command that is not built in."""
        command = super().get_command(ctx, cmd_name)
        if command is None:
            command = registry_of(ctx, None).commands.get(cmd_name)
        return command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names. ``--help`` works even if a plugin is broken, and reports it."""
        names = super().list_commands(ctx)
        try:
            names += registry_of(ctx, None).commands
        except EngageError as error:
            CommandFailed(error).show()
        return sorted(names)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in groups; those of plugins come last."""
        built_in = {str(command.name) for group in GROUPS.values() for command in group}
        others = [name for name in self.list_commands(ctx) if name not in built_in]
        commands = [command for name in others if (command := self.get_command(ctx, name))]
        widest = max(map(len, (*built_in, *others)))
        for title, group in {**GROUPS, "From plugins": commands}.items():
            # Two columns of equal width in all groups, with the indent and the gap of click.
            rows = [
                (f"{cmd.name:<{widest}}", cmd.get_short_help_str(formatter.width)) for cmd in group
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and turn its errors into :class:`CommandFailed`."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # The reader of our output has closed it: click exits silently.
        except UnicodeEncodeError as error:  # A byte of an argument is not UTF-8.
            problem = f"{error.object!r} cannot be encoded as {error.encoding.upper()}"
            raise CommandFailed(EngageError(problem)) from error
        except (EngageError, OSError) as error:
            discard_output()
            raise CommandFailed(error) from error


def _open_closed_files() -> None:
    """Open the null device in the place of standard files that are closed.

    Otherwise a socket would get the number of one, and children would take it for that file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


@click.group(
    cls=Root,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=example("init && engage serve"),
)
@click.version_option(engage.__version__, prog_name="engage")
@click.pass_context
def main(ctx: click.Context) -> None:
    """A self-hosted event-ingestion server."""
    ctx.obj = None
    _open_closed_files()
    if sys.stdout is None and ctx.invoked_subcommand not in (serve.name, load_command.name):
        raise EngageError("standard output is closed")


for _command in (command for group in GROUPS.values() for command in group):
    main.add_command(_command)
