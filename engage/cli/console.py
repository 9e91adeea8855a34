# SPDX-License-Identifier: Apache-2.0
"""``engage console``, ``console-link``, ``console-logout`` and ``console-password``."""

from __future__ import annotations

import click

from engage.api import ConfigError
from engage.cli.instance import Instance, audit, example, now, on_instance
from engage.config import Config, ConsoleConfig
from engage.store.facade import Storage

__all__ = ["console", "console_link", "console_logout", "console_password"]


@click.command(epilog=example("console"))
@on_instance()
def console(instance: Instance) -> None:
    """Run the console alone until SIGTERM or Ctrl-C.

    `engage serve` runs the console beside the server. Run it alone on another machine, for example
    one console for several servers with one MongoDB or PostgreSQL.
    """
    # Imported here, because no other command needs the server.
    from engage.server.console import serve_console

    instance.registry.check(instance.config)
    instance.ctx.exit(serve_console(instance.config, instance.registry))


@click.command("console-link", epilog=example("console-link"))
@on_instance()
def console_link(instance: Instance) -> None:
    """Print a link that signs you in to the console.

    The link works once, for 10 minutes.
    """
    from engage.server.console import make_link

    settings = _settings(instance.config)
    if settings.port == 0 and settings.public_url is None:
        problem = "console.port is 0, so this command does not know the port; set it, or"
        raise ConfigError(f"{instance.config.path}: {problem} console.public_url")

    async def make(store: Storage) -> str:
        url = await make_link(settings, store, now())
        await audit(store, "link-made", {})
        return url

    click.echo(instance.run(make))


@click.command("console-logout", epilog=example("console-logout"))
@on_instance()
def console_logout(instance: Instance) -> None:
    """Sign everyone out of the console.

    It takes effect within two seconds, on every console of the store.
    """
    from engage.server.console import end_sessions

    _settings(instance.config)

    async def end(store: Storage) -> None:
        await end_sessions(store, now())
        await audit(store, "all-signed-out", {})

    instance.run(end)
    click.echo("All sessions of the console end within 2 seconds.")


@click.command("console-password", epilog=example("console-password"))
def console_password() -> None:
    """Ask for a password and print its config line.

    The line has a hash of the password (scrypt). It belongs in the section [console].
    """
    from engage.server.console import password_setting

    password = click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True)
    click.echo(f'password = "{password_setting(password)}"')


def _settings(config: Config) -> ConsoleConfig:
    if config.console is None:
        raise ConfigError(f"{config.path}: there is no [console] section, so there is no console")
    return config.console
