# SPDX-License-Identifier: Apache-2.0
"""``engage webhook-url``, ``webhook-test`` and ``webhook-retry``.

What they need of the server is imported when they run: no other command needs it loaded.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
import orjson

from engage.api import MAX_TIME, ConfigError, DeadLetterStore, EngageError, Provider
from engage.cli.common import config_option, moment, opened, registry_of, safe
from engage.config import Config, load
from engage.registry import Registry
from engage.storage.export import all_pages

if TYPE_CHECKING:
    from engage.deliveries.dry_run import Recording

__all__ = ["webhook_retry", "webhook_test", "webhook_url"]

_PAGE = 100


class Moment(click.ParamType[float]):
    """Seconds since 1970, or RFC 3339."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read it; anything else is wrong usage."""
        try:
            seconds = float(str(value))
        except ValueError:
            pass
        else:
            if 0 <= seconds * 1000 <= MAX_TIME:
                return seconds
        try:
            return moment(str(value)).timestamp()
        except ValueError:
            self.fail(
                f"{value!r} is no time such as 1700000000 or 2026-01-31T12:00:00Z", param, ctx
            )


@click.command("webhook-url", epilog="\b\nExample:\n  engage webhook-url sendgrid --workspace acme")
@click.argument("provider")
@config_option
@click.option("--workspace", metavar="ID", help="Only of this workspace.")
@click.pass_context
def webhook_url(
    ctx: click.Context, provider: str, config_path: Path, workspace: str | None
) -> None:
    """Print the URL to paste at PROVIDER.

    One for each workspace that has it, and what else to set there.
    """
    config = load(config_path)
    enabled = _enabled(registry_of(ctx), config, provider)
    if workspace is not None:
        enabled = {_chosen(enabled, provider, workspace): enabled[workspace]}
    base = config.server.public_url
    if base is None:
        base = f"http://{config.server.host}:{config.server.port}"
        click.echo(
            "engage: server.public_url is not set: providers reach this server only if they"
            " run on this machine",
            err=True,
        )
    options = {known.id: known.webhooks for known in config.workspaces}
    for name in enabled:
        url = f"{base}/api/public/webhooks/{provider}?workspaceId={name}"
        # What the provider signs, if that is not our own address.
        own = options[name][provider].get("public_url")
        click.echo(f"{name}\t{safe(own if isinstance(own, str) else url)}")
    setup = next(iter(enabled.values())).setup
    if setup:
        click.echo(f"\n{setup}")


@click.command(
    "webhook-test",
    epilog="\b\nExample:\n  engage webhook-test stripe delivery.http --now 2026-01-31T12:00:00Z",
)
@click.argument("provider")
@click.argument("file", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@config_option
@click.option("--workspace", metavar="ID", help="Which workspace it is for, if not the only one.")
@click.option(
    "--now",
    type=Moment(),
    help="The time at which it arrived, for schemes that refuse old deliveries.",
)
@click.pass_context
def webhook_test(
    ctx: click.Context,
    provider: str,
    file: Path,
    config_path: Path,
    workspace: str | None,
    now: float | None,
) -> None:
    """Try a recorded delivery, store nothing.

    Verifies and translates it as the server would. FILE holds it as it came over the wire (headers,
    an empty line, the body; a request line may stand before them), or as JSON with url, headers,
    body or body_base64, and now. The events are written as NDJSON.
    """
    from engage.deliveries.dry_run import read_recording

    config = load(config_path)
    registry = registry_of(ctx)
    enabled = _enabled(registry, config, provider)
    recording = read_recording(file.read_bytes(), provider)
    chosen = _chosen(enabled, provider, workspace or recording.workspace)
    asyncio.run(_rehearse(config, provider, chosen, enabled[chosen], recording, now))


async def _rehearse(
    config: Config,
    name: str,
    workspace: str,
    provider: Provider,
    recording: Recording,
    now: float | None,
) -> None:
    from engage.deliveries.dry_run import rehearse
    from engage.deliveries.fetcher import Fetcher

    if now is None:
        now = time.time() if recording.now is None else recording.now
    fetcher = Fetcher()
    try:
        result = await rehearse(
            config, name, workspace, provider, recording, now=now, fetcher=fetcher
        )
    finally:
        await fetcher.close()
    terminal = sys.stdout.isatty()
    click.echo(f"verified for workspace {workspace}", err=True)
    for document in result.documents:
        line = orjson.dumps(document).decode()
        click.echo(safe(line) if terminal else line)
    click.echo(
        f"{len(result.documents)} events, {result.ignored} ignored,"
        f" {len(result.problems)} not understood",
        err=True,
    )
    if result.problems:
        raise EngageError(f"it would be kept as a dead letter: {result.problems[0]}")


@click.command("webhook-retry", epilog="\b\nExample:\n  engage webhook-retry --provider sendgrid")
@config_option
@click.option("--workspace", metavar="ID", help="Only of this workspace.")
@click.option("--provider", metavar="NAME", help="Only of this provider.")
@click.option("--id", "letter_id", metavar="ID", help="Only this dead letter.")
@click.pass_context
def webhook_retry(
    ctx: click.Context,
    config_path: Path,
    workspace: str | None,
    provider: str | None,
    letter_id: str | None,
) -> None:
    """Translate dead deliveries again.

    Deliveries that verified and were not understood are dead letters.
    What translates now is stored, and its letter removed; what was stored before is a duplicate.
    """
    config = load(config_path)
    asyncio.run(_retry(registry_of(ctx), config, workspace, provider, letter_id))


async def _retry(
    registry: Registry,
    config: Config,
    workspace: str | None,
    provider: str | None,
    letter_id: str | None,
) -> None:
    from engage.app import build
    from engage.deliveries.delivery import UNTRANSLATED

    # Only to see that there is a store: the server below would be asked to make one.
    async with opened(registry, config):
        pass
    app = build(config, registry)
    done = left = events = 0
    try:
        await app.open(create=False)
        store = app.store
        if not isinstance(store, DeadLetterStore):
            raise ConfigError("the storage keeps no dead letters")
        letters = [
            letter
            async for letter in all_pages(
                lambda after: store.scan_dead_letters(workspace, after=after, limit=_PAGE)
            )
            if letter.reason == UNTRANSLATED
            and provider in (None, letter.origin)
            and letter_id in (None, letter.id)
        ]
        for letter in letters:
            try:
                result = await app.deliveries.retry(letter)
            except ConfigError as error:
                click.echo(f"engage: {safe(str(error))}", err=True)
                left += 1
                continue
            events += result.accepted
            if result.rejected:
                left += 1
            else:
                await store.remove(letter.workspace_id, [letter.id])
                done += 1
    finally:
        await app.close()
    click.echo(f"{done} deliveries translated, {events} events stored")
    if left:
        raise EngageError(f"{left} of {done + left} deliveries still cannot be translated")


def _enabled(registry: Registry, config: Config, provider: str) -> Mapping[str, Provider]:
    """:raises ConfigError: it is not installed, or no workspace has it."""
    if provider not in registry.webhooks:
        raise ConfigError(
            f"no webhook provider {provider!r} is installed; there is:"
            f" {', '.join(sorted(registry.webhooks)) or 'none'}"
        )
    enabled = registry.make_webhooks(config).get(provider, {})
    if not enabled:
        raise ConfigError(
            f"{config.path}: no workspace has {provider}; add [workspaces.webhooks.{provider}]"
        )
    return enabled


def _chosen(enabled: Mapping[str, Provider], provider: str, workspace: str | None) -> str:
    if workspace is None and len(enabled) == 1:
        return next(iter(enabled))
    if workspace is None:
        raise ConfigError(f"say for which --workspace: {', '.join(enabled)}")
    if workspace not in enabled:
        raise ConfigError(f"the workspace {workspace!r} has no {provider}")
    return workspace
