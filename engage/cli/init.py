# SPDX-License-Identifier: Apache-2.0
"""``engage init``."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

import click

from engage.api import ConfigError
from engage.cli.instance import DEFAULT_CONFIG, config_option, example
from engage.config import ConsoleConfig, ServerConfig

_TEMPLATE: Final = """\
# docs/configuration.md explains every key.

[server]
host = "127.0.0.1"
port = {port}

# The web pages in which you see your write keys and events. Only this machine can open them.
[console]
host = "127.0.0.1"
port = {console_port}

[storage]
backend = "sqlite"

[storage.sqlite]
path = {store}

# Makes the hashes of people whom you erase. Never change it: backups are compared by it.
[erasures]
key = "{erasures_key}"

[[workspaces]]
id = "default"
name = "Default"

# Clients send a write key to identify the workspace. It is not a secret: web pages may contain it.
[[workspaces.write_keys]]
id = "first"
key = "{key}"
"""
_PORT: Final = ServerConfig().port
_CONSOLE_PORT: Final = ConsoleConfig().port


@click.command(
    epilog=example("init /srv/engage", "init /etc/engage --store /var/lib/engage/engage.db")
)
@click.argument(
    "folder", metavar="[DIR]", required=False, type=click.Path(file_okay=False, path_type=Path)
)
@config_option
@click.option(
    "--store",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="The file of the store. By default, it is engage.db beside the config.",
)
@click.option("--then-serve", is_flag=True, help="Do not tell how to start the server.")
def init(folder: Path | None, config_path: Path, store: Path | None, then_serve: bool) -> None:
    """Create a config with SQLite and a new write key.

    The config has one workspace. Existing files are never overwritten. `engage serve` creates the
    store.

    DIR is the folder to create it in, by default the current one. It is created if it does not
    exist.
    """
    path = config_path if folder is None else folder / config_path.name
    key = secrets.token_hex(16)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        # O_EXCL also detects a file that another process creates at the same time.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(f"{path} already exists; nothing was changed") from None
    with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
        text = _TEMPLATE.format(
            port=_PORT,
            console_port=_CONSOLE_PORT,
            key=key,
            # A path in the config is relative to the config. A JSON string is one of TOML.
            store=json.dumps("engage.db" if store is None else str(store.absolute())),
            erasures_key=secrets.token_hex(32),
        )
        file.write(text)
    engage = _program()
    where = "" if path == Path(DEFAULT_CONFIG) else f" --config {shlex.quote(str(path))}"
    start = "\n" if then_serve else f" Start the server:\n\n  {engage} serve{where}\n"
    click.echo(f"Created {path}.{start}")
    click.echo("Send an event from a second terminal:\n")
    click.echo(
        f"  curl -u {key}: -H 'Content-Type: application/json'"
        f' -d \'{{"userId": "ann", "event": "Signed Up"}}\''
        f" http://127.0.0.1:{_PORT}/api/public/apps/track\n"
    )
    click.echo(f"Show the stored events:\n\n  {engage} export events{where}")


def _program() -> str:
    """Return how to call this program: by its path if it is not on ``PATH``."""
    called = Path(sys.argv[0])
    if called.name != "engage" or shutil.which("engage"):
        return "engage"
    return shlex.quote(os.path.relpath(called))
