# SPDX-License-Identifier: Apache-2.0
"""``engage subscription-link``."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

import click

from engage.api import DAY_MS, ConfigError, EngageError, identifier_value
from engage.cli.common import config_option, load_chosen, now, workspace_option
from engage.handlers.operations import PREFERENCES_PAGE
from engage.keys.links import subscription_hash

__all__ = ["subscription_link"]


@click.command(
    "subscription-link",
    epilog="\b\nExample:\n  engage subscription-link --user u-1 --group newsletter --headers",
)
@config_option
@workspace_option("The workspace of the user.")
@click.option(
    "--user", required=True, metavar="ID", help="Id of the user, or anonymous id of a visitor."
)
@click.option("--group", metavar="ID", help="The subscription group that the message is sent to.")
@click.option(
    "--expires",
    type=click.IntRange(1, 36500),
    metavar="DAYS",
    help="Days after which the link only unsubscribes; by default, it does not expire.",
)
@click.option("--lang", metavar="CODE", help="Language of the page; by default, the browser's.")
@click.option("--headers", is_flag=True, help="Print the headers of an e-mail.")
def subscription_link(
    config_path: Path,
    workspace_id: str | None,
    user: str,
    group: str | None,
    expires: int | None,
    lang: str | None,
    headers: bool,
) -> None:
    """Print the link to a user's preferences page.

    Anyone who has the link can change what the user receives, so send it to that user only. With
    --headers, print the two headers with which mail programs offer to unsubscribe.
    docs/subscriptions.md shows how a program makes such a link.
    """
    config, name = load_chosen(config_path, workspace_id)
    [workspace] = [one for one in config.workspaces if one.id == name]
    if not workspace.subscription_secrets:
        raise ConfigError(f"{config.path}: the workspace {name} has no subscription_secret")
    groups = [one.id for one in workspace.subscription_groups]
    if group is not None and group not in groups:
        there = ", ".join(groups) or "it has none"
        raise ConfigError(f"{group!r} is not a subscription group of {name} ({there})")
    if identifier_value("id", user) is None:
        raise EngageError("an id has 1 to 512 characters")
    base = config.server.public_url
    if headers and not (base or "").startswith("https://"):
        raise ConfigError(
            f"{config.path}: server.public_url must begin with https://; mail programs use no"
            " other links"
        )
    if base is None:
        base = f"http://{config.server.host}:{config.server.port}"
        click.echo(
            "engage: server.public_url is not set: only this machine can open the link", err=True
        )
    until = None if expires is None else (now() + expires * DAY_MS) // 1000
    signed = subscription_hash(
        workspace.subscription_secrets[0],
        user_id=user,
        workspace_id=name,
        identifier=user,
        identifier_key="id",
        expires=until,
    )
    members = {"w": name, "i": user, "ik": "id", "h": signed, "e": until, "s": group, "lang": lang}
    if group is not None:
        members["sub"] = "0"
    query = urlencode({key: value for key, value in members.items() if value is not None})
    url = f"{base}{PREFERENCES_PAGE}?{query}"
    if headers:
        click.echo(f"List-Unsubscribe: <{url}>")
        click.echo("List-Unsubscribe-Post: List-Unsubscribe=One-Click")
    else:
        click.echo(url)
