# SPDX-License-Identifier: Apache-2.0
"""``engage serve``."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from engage.cli.instance import Instance, example, on_instance


@click.command(epilog=example("serve --port 9000 --workers 2"))
@on_instance()
@click.option("--host", metavar="ADDRESS", help="Overrides server.host.")
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Overrides server.port; 0 means any free port."
)
@click.option("--console-host", metavar="ADDRESS", help="Overrides console.host.")
@click.option("--workers", type=click.IntRange(1, 256), help="Overrides server.workers.")
def serve(
    instance: Instance,
    host: str | None,
    port: int | None,
    console_host: str | None,
    workers: int | None,
) -> None:
    """Run the server until SIGTERM or Ctrl-C."""
    # Imported here, because no other command needs the server.
    from engage.server.serve import serve as run

    config = instance.config
    given: dict[str, Any] = {"host": host or None, "port": port, "workers": workers}
    overrides = {name: value for name, value in given.items() if value is not None}
    config = dataclasses.replace(config, server=dataclasses.replace(config.server, **overrides))
    if console_host and config.console is not None:
        console = dataclasses.replace(config.console, host=console_host)
        config = dataclasses.replace(config, console=console)
    instance.registry.check(config)
    instance.ctx.exit(run(config, instance.registry))
