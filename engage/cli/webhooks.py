# SPDX-License-Identifier: Apache-2.0
"""``engage webhook-url``, ``webhook-test`` and ``webhook-retry``.

The server's modules are imported when one of these runs, because no other command needs them.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
import orjson

from engage.api import MAX_TIME, ConfigError, EngageError, Provider, ProviderFactory
from engage.cli.instance import Instance, example, on_instance, parse_time, the_only
from engage.cli.output import plural, print_json, safe, warn
from engage.reading.scans import all_pages
from engage.registry import Registered, Registry
from engage.store.facade import Storage

if TYPE_CHECKING:
    from engage.app import App
    from engage.deliveries.dry_run import Rehearsal

__all__ = ["webhook_retry", "webhook_test", "webhook_url"]


class Moment(click.ParamType[float]):
    """A time: seconds since 1970, or RFC 3339."""

    name = "time"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Read a time; anything else is a usage error."""
        try:
            seconds = float(str(value))
        except ValueError:
            pass
        else:
            if 0 <= seconds * 1000 <= MAX_TIME:
                return seconds
        try:
            return parse_time(str(value)).timestamp()
        except ValueError:
            self.fail(
                f"{value!r} is not a time; use for example 1700000000 or 2026-01-31T12:00:00Z",
                param,
                ctx,
            )


@click.command("webhook-url", epilog=example("webhook-url sendgrid --workspace acme"))
@click.argument("provider")
@on_instance("Only this workspace's URL.")
def webhook_url(instance: Instance, provider: str) -> None:
    """Print the URL of a webhook, and how to set it up.

    Enter the URL at PROVIDER. There is one URL for each workspace that has the provider. If none
    has it yet, there is one for each workspace: some services show their secret only after the URL
    is entered there. The steps below the URLs are to be followed in their order.
    """
    registered = _installed(instance.registry, provider)
    tables = {workspace.id: workspace.webhooks.get(provider) for workspace in instance.workspaces}
    enabled = [name for name, table in tables.items() if table is not None]
    chosen = enabled or list(tables)
    base = instance.public_url("only providers on this machine can reach this server")
    for name in chosen:
        url = f"{base}/api/public/webhooks/{provider}?workspaceId={name}"
        # The provider signs the URL that is registered there; an option can set another one.
        own = (tables[name] or {}).get("public_url")
        click.echo(f"{name}\t{safe(own if isinstance(own, str) else url)}")
    setup = getattr(registered.factory, "setup", "")
    if setup:
        click.echo(f"\n{setup}")
    missing = [name for name in chosen if name not in enabled]
    if missing:
        click.echo(
            f"\nThe options belong in the table [workspaces.webhooks.{provider}]. Deliveries are"
            f" refused until\nit is in the config and engage has been restarted."
            f" Missing in: {', '.join(missing)}"
        )


@click.command(
    "webhook-test", epilog=example("webhook-test stripe delivery.http --now 2026-01-31T12:00:00Z")
)
@click.argument("provider")
@click.argument("file", type=click.Path(dir_okay=False, exists=True, path_type=Path))
@on_instance("The workspace that the delivery is for.")
@click.option("--store", is_flag=True, help="Look users up in the storage, as the server does.")
@click.option(
    "--now",
    type=Moment(),
    help="When the delivery arrived; some providers' deliveries are refused when they are old.",
)
def webhook_test(
    instance: Instance, provider: str, file: Path, now: float | None, *, store: bool
) -> None:
    """Try a recorded delivery without storing it.

    Verifies and translates it as the server would. Without --store, users are not looked up: an
    event without a user id is printed as if no user had its address.

    FILE is the request as it was sent (headers, an empty line and the body, optionally a request
    line before them), or a JSON object with headers, body or body_base64, and optionally url and
    now. docs/webhooks.md describes how to record one. The events are printed as NDJSON.
    """
    from engage.deliveries.delivery import Destination
    from engage.deliveries.dry_run import named_workspace, read_recording, rehearse
    from engage.deliveries.fetcher import Fetcher
    from engage.subscriptions.recipients import Recipients

    config = instance.config
    enabled = _enabled(instance, provider)
    delivery = read_recording(file.read_bytes(), provider, now=now)
    chosen = _chosen(enabled, provider, instance.workspace_id or named_workspace(delivery))
    table = next(workspace for workspace in config.workspaces if workspace.id == chosen)
    destination = Destination.of(table, provider, enabled[chosen])

    async def run(store: Storage | None) -> Rehearsal:
        timeout = config.storage.write_timeout
        recipients = None if store is None else Recipients(store, timeout)
        fetcher = Fetcher()
        try:
            return await rehearse(config, destination, delivery, fetcher, recipients)
        finally:
            await fetcher.close()

    result = instance.run(run) if store else asyncio.run(run(None))
    click.echo(f"verified for workspace {chosen}", err=True)
    for document in result.documents:
        print_json(orjson.dumps(document))
    for change in result.effects.changes:
        click.echo(
            safe(f"unsubscribes {change.subject.id} from {', '.join(change.choices)}"), err=True
        )
    for suppression in result.effects.suppressions:
        group = f" for {suppression.group_id}" if suppression.group_id else ""
        where = f"{suppression.channel} address {suppression.address}{group}"
        verb = "lifts what suppressed the" if suppression.lifted else "suppresses the"
        click.echo(safe(f"{verb} {where} ({suppression.reason})"), err=True)
    if result.lookups and not store:
        warn(
            f"{plural(result.lookups, 'event')} without a user id: the server looks for the user by"
            " address or another trait; use --store to do the same"
        )
    click.echo(
        f"{plural(len(result.documents), 'event')}, {result.ignored} ignored,"
        f" {len(result.problems)} not translated",
        err=True,
    )
    if result.problems:
        raise EngageError(
            f"the server would keep the delivery as a dead letter: {result.problems[0]}"
        )


@click.command("webhook-retry", epilog=example("webhook-retry --provider sendgrid"))
@on_instance("Only this workspace's deliveries.")
@click.option("--provider", metavar="NAME", help="Only this provider's deliveries.")
@click.option("--id", "letter_id", metavar="ID", help="Only this dead letter.")
def webhook_retry(instance: Instance, provider: str | None, letter_id: str | None) -> None:
    """Retry the deliveries that are kept as dead letters.

    Such a delivery was verified, but engage could not translate all of it. If it can be translated
    now, its events are stored and the dead letter is removed. Events that are already stored are
    not stored a second time.
    """
    from engage.deliveries.delivery import UNTRANSLATED

    done = left = events = 0

    async def retry(app: App) -> None:
        nonlocal done, left, events
        scan = functools.partial(app.store.scan_dead_letters, instance.workspace_id)
        letters = [
            letter
            async for letter in all_pages(scan)
            if letter.reason == UNTRANSLATED
            and provider in (None, letter.origin)
            and letter_id in (None, letter.id)
        ]
        for letter in letters:
            try:
                result = await app.deliveries.retry(letter)
            except ConfigError as error:
                warn(str(error))
                left += 1
                continue
            events += result.accepted
            if result.rejected:
                left += 1
            else:
                await app.store.remove(letter.workspace_id, [letter.id])
                done += 1

    instance.run_server(retry)
    translated = f"{done} {'delivery' if done == 1 else 'deliveries'}"
    click.echo(f"{translated} translated, {plural(events, 'event')} stored")
    if left:
        raise EngageError(f"{left} of {done + left} deliveries still cannot be translated")


def _installed(registry: Registry, provider: str) -> Registered[ProviderFactory]:
    """Return the registration of a provider.

    :raises ConfigError: if the provider is not installed.
    """
    if provider not in registry.webhooks:
        raise ConfigError(
            f"the webhook provider {provider!r} is not installed; installed are:"
            f" {', '.join(sorted(registry.webhooks)) or 'no providers'}"
        )
    return registry.webhooks[provider]


def _enabled(instance: Instance, provider: str) -> Mapping[str, Provider]:
    """Return workspace id → the provider, for each workspace that has it.

    :raises ConfigError: if the provider is not installed, or no workspace has it.
    """
    _installed(instance.registry, provider)
    enabled = instance.registry.make_webhooks(instance.config).get(provider, {})
    if not enabled:
        missing = f"no workspace has {provider}; add [workspaces.webhooks.{provider}]"
        raise ConfigError(f"{instance.config.path}: {missing}")
    return enabled


def _chosen(enabled: Mapping[str, Provider], provider: str, workspace: str | None) -> str:
    if workspace is None:
        return the_only(enabled)
    if workspace not in enabled:
        raise ConfigError(f"the workspace {workspace!r} does not have {provider}")
    return workspace
