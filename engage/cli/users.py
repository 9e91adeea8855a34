# SPDX-License-Identifier: Apache-2.0
"""``engage users``."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import click
import orjson

from engage.api import (
    EngageError,
    Event,
    EventFilter,
    Kind,
    Subject,
    UserProfile,
    VisitorProfile,
)
from engage.cli.common import (
    config_option,
    load_chosen,
    now,
    print_table,
    safe,
    shown_time,
    with_store,
    workspace_option,
)
from engage.pipeline.operator import decide_link, remove_traits
from engage.store.facade import Storage
from engage.upkeep.export import render

_workspace_option = workspace_option("The workspace of the user, if there are several.")


#: Newest events that are shown of a user.
_EVENTS: Final = 10
#: Seconds for which a store without an index of users looks for them.
_SEARCH_SECONDS: Final = 5.0


@click.group(epilog="\b\nExample:\n  engage users show u-1")
def users() -> None:
    """Show a user or visitor, or correct its traits and links."""


@users.command("show", epilog="\b\nExample:\n  engage users show --workspace acme u-1")
@config_option
@_workspace_option
@click.argument("user", metavar="ID")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def show(
    ctx: click.Context, config_path: Path, workspace_id: str | None, user: str, as_json: bool
) -> None:
    """Print what is known of a user, or of a visitor.

    ID is a user id, or the anonymous id of a visitor. The command prints the profile (traits,
    groups, anonymous ids, and when the user was seen first and last), the subscription choices,
    and the newest events with this id. A track, page or screen call makes no profile, so there may
    be events without one. The exit status is 1 if nothing is known of the id.
    """
    config, workspace = load_chosen(config_path, workspace_id, reads_with=())
    found = with_store(ctx, config, lambda store: _look_up(store, workspace, user))
    about = {} if found.user is None else orjson.loads(render("users", found.user).json)
    visitor = {} if found.visitor is None else orjson.loads(render("visitors", found.visitor).json)
    if as_json:
        documents = {
            "user": about or None,
            "visitor": visitor or None,
            "visitors": found.visitors,
            "subscriptions": dict(found.choices),
            "events": [event.document() for event in found.events],
        }
        click.echo(safe(orjson.dumps(documents).decode()))
        return
    lines = {"id": user}
    if visitor:
        owner = visitor["userId"]
        of_user = "belongs to no user" if owner is None else f"belongs to the user {owner}"
        lines["visitor"] = "there is one with this id, too" if about else of_user
    shown = about or visitor
    if not shown:
        lines["profile"] = "none; there are only events with this user id"
    else:
        lines["seen first"], lines["seen last"] = shown["createdAt"], shown["updatedAt"]
        lines["groups"] = ", ".join(shown["groups"]) or "-"
    if found.user is not None:
        lines["anonymous ids"] = ", ".join(found.user.anonymous_ids) or "-"
        lines["visitors"] = ", ".join(found.visitors) or "-"
        if found.user.left_out:
            lines["left out"] = f"{found.user.left_out} traits and groups of visitors"
    for trait, value in shown.get("traits", {}).items():
        lines[f"trait {trait}"] = orjson.dumps(value).decode()
    for group, subscribed in found.choices.items():
        lines[f"subscription {group}"] = "yes" if subscribed else "no"
    for name, text in lines.items():
        click.echo(f"{safe(name)}: {safe(text)}")
    if found.events:
        click.echo()
        rows = [
            (shown_time(e.received_at), e.type, e.name or "-", e.message_id) for e in found.events
        ]
        print_table(("RECEIVED", "TYPE", "NAME", "MESSAGE ID"), rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """What is known of an id."""

    user: UserProfile | None
    visitor: VisitorProfile | None
    #: Anonymous ids of the visitors that belong to the user.
    visitors: Sequence[str]
    choices: Mapping[str, bool]
    #: The newest ones.
    events: Sequence[Event]


async def _look_up(store: Storage, workspace: str, name: str) -> _Known:
    """Return what is known of a user or a visitor.

    :raises EngageError: if the storage has no profiles, or nothing is known of the id.
    """
    user, visitor = await store.profile(workspace, name), await store.visitor(workspace, name)
    linked = [await store.visitor(workspace, one) for one in (user.anonymous_ids if user else ())]
    wanted, kind = EventFilter(workspace_id=workspace, user_id=name), Kind.USER
    if user is None and visitor is not None:
        wanted = EventFilter(workspace_id=workspace, begins=[(["anonymous_id"], name)])
        kind = Kind.VISITOR
    choices: Mapping[str, bool] = {}
    choices = await store.state(workspace, Subject(kind, name))
    events: list[Event] = []
    cursor, end = None, time.monotonic() + _SEARCH_SECONDS
    while page := await store.recent(wanted, before=cursor, limit=_EVENTS - len(events)):
        matching = filter(wanted.matches, page.items)
        events += [event for event in matching if name in (event.user_id, event.anonymous_id)]
        cursor = page.cursor
        if cursor is None or len(events) == _EVENTS:
            break
        if time.monotonic() > end:
            click.echo("engage: older events were not searched", err=True)
            break
    if user is None and visitor is None and not choices and not events:
        known = "user, visitor or event with the id"
        raise EngageError(f"the workspace {workspace!r} has no {known} {name!r}")
    return _Known(
        user=user,
        visitor=visitor,
        visitors=[one.anonymous_id for one in linked if one is not None and one.user_id == name],
        choices=choices,
        events=events,
    )


@users.command(
    "remove-trait",
    epilog="\b\nExample:\n  engage users remove-trait --workspace acme u-1 email plan",
)
@config_option
@_workspace_option
@click.option("--anonymous-id", is_flag=True, help="USER is the anonymous id of a visitor.")
@click.argument("user")
@click.argument("traits", metavar="TRAIT...", nargs=-1, required=True)
@click.pass_context
def remove_trait(
    ctx: click.Context,
    config_path: Path,
    workspace_id: str | None,
    user: str,
    traits: tuple[str, ...],
    *,
    anonymous_id: bool,
) -> None:
    """Remove traits of a user, or of a visitor.

    The user no longer has the traits, is not found by them, and has room for others, until a client
    sets them again. That is also true of traits that a visitor brought. The removal is an event,
    which `engage export events` shows.
    """
    config, workspace = load_chosen(config_path, workspace_id)
    kind = Kind.VISITOR if anonymous_id else Kind.USER
    removed = with_store(
        ctx,
        config,
        lambda store: remove_traits(store, workspace, kind, user, traits, now=now()),
    )
    for trait in removed:
        click.echo(f"removed {safe(trait)}" if sys.stdout.isatty() else f"removed\t{safe(trait)}")
    for trait in dict.fromkeys(traits):
        if trait not in removed:
            click.echo(f"engage: the {kind} does not have the trait '{safe(trait)}'", err=True)
    if not removed:
        ctx.exit(1)


def _link_command(name: str, text: str, *, linked: bool) -> None:
    """Make the command that restores or undoes a link."""
    example = f"engage users {name} --workspace acme --user u-1 --anonymous-id v-1"

    @users.command(name, help=text, epilog=f"\b\nExample:\n  {example}")
    @config_option
    @_workspace_option
    @click.option("--user", required=True, metavar="ID", help="The user.")
    @click.option("--anonymous-id", required=True, metavar="ID", help="The anonymous id.")
    @click.pass_context
    def decide(
        ctx: click.Context,
        config_path: Path,
        workspace_id: str | None,
        user: str,
        anonymous_id: str,
    ) -> None:
        config, workspace = load_chosen(config_path, workspace_id)
        with_store(
            ctx,
            config,
            lambda store: decide_link(
                store, workspace, user, anonymous_id, linked=linked, now=now()
            ),
        )
        click.echo(f"{name}ed")


_link_command(
    "unlink",
    """Undo the link of an anonymous id.

    What the visitor with this id did then belongs to the next user that it was linked to, or to
    nobody. Events of clients cannot restore the link; `engage users link` does.
    """,
    linked=False,
)
_link_command(
    "link",
    """Link an anonymous id to a user.

    This also restores what `engage users unlink` undid. If the id was linked to another user
    before, and that link is not undone, its visitor belongs to that user.
    """,
    linked=True,
)
