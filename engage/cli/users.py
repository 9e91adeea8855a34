# SPDX-License-Identifier: Apache-2.0
"""``engage users``."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
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
from engage.cli.instance import Instance, example, json_option, now, on_instance
from engage.cli.output import print_cells, print_table, safe, shown_time, warn
from engage.pipeline.operator import decide_link, remove_traits
from engage.reading.export import render
from engage.store.facade import Storage

_WORKSPACE: Final = "The workspace of the user, if there are several."
#: Newest events that are shown of a user.
_EVENTS: Final = 10
#: Seconds for which a store without an index of users looks for them.
_SEARCH_SECONDS: Final = 5.0


@click.group(epilog=example("users show u-1"))
def users() -> None:
    """Show a user or visitor, or correct its traits and links."""


@users.command("show", epilog=example("users show --workspace acme u-1"))
@on_instance(_WORKSPACE, reads_with=())
@click.argument("user", metavar="ID")
@json_option()
def show(instance: Instance, user: str, *, as_json: bool) -> None:
    """Print what is known of a user, or of a visitor.

    ID is a user id, or the anonymous id of a visitor. The command prints the profile (traits,
    groups, anonymous ids, the time of the first event and that of the last change), the
    subscription choices, and the newest events with this id. A track, page or screen call makes no
    profile, so there may be events without one. The exit status is 1 if nothing is known of the id.
    """
    facts = instance.run(_look_up, instance.workspace.id, user)
    about = {} if facts.user is None else orjson.loads(render("users", facts.user).json)
    visitor = {} if facts.visitor is None else orjson.loads(render("visitors", facts.visitor).json)
    if as_json:
        documents = {
            "user": about or None,
            "visitor": visitor or None,
            "visitors": facts.visitors,
            "subscriptions": dict(facts.choices),
            "events": [event.document() for event in facts.events],
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
        lines["profile"] = "none; there are only events with this id"
    else:
        lines["first event"], lines["last change"] = shown["createdAt"], shown["updatedAt"]
        lines["groups"] = ", ".join(shown["groups"]) or "-"
    if facts.user is not None:
        lines["anonymous ids"] = ", ".join(facts.user.anonymous_ids) or "-"
        lines["visitors"] = ", ".join(facts.visitors) or "-"
        if facts.user.left_out:
            lines["left out"] = f"{facts.user.left_out} traits and groups of visitors"
    for trait, value in shown.get("traits", {}).items():
        lines[f"trait {trait}"] = orjson.dumps(value).decode()
    for group, subscribed in facts.choices.items():
        lines[f"subscription {group}"] = "yes" if subscribed else "no"
    for name, text in lines.items():
        click.echo(f"{safe(name)}: {safe(text)}")
    if facts.events:
        click.echo()
        rows = [
            (shown_time(e.received_at), e.type, e.name or "-", e.message_id) for e in facts.events
        ]
        print_table(("RECEIVED", "TYPE", "NAME", "MESSAGE ID"), rows)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What is known of an id."""

    user: UserProfile | None
    visitor: VisitorProfile | None
    #: Anonymous ids of the visitors that belong to the user.
    visitors: Sequence[str]
    choices: Mapping[str, bool]
    #: The newest ones.
    events: Sequence[Event]


async def _look_up(store: Storage, workspace: str, name: str) -> _Facts:
    """Return what is known of a user or a visitor.

    :raises EngageError: if nothing is known of the id.
    """
    user, visitor = await store.profile(workspace, name), await store.visitor(workspace, name)
    linked = [await store.visitor(workspace, x) for x in (user.anonymous_ids if user else ())]
    kind = Kind.VISITOR if user is None and visitor is not None else Kind.USER
    choices = await store.state(workspace, Subject(kind, name))
    events: list[Event] = []
    if kind is Kind.USER:
        events = await _newest(store, EventFilter(workspace_id=workspace, user_id=name), name)
    if user is None and not events:
        of_visitor = EventFilter(workspace_id=workspace, begins=[(["anonymous_id"], name)])
        events = await _newest(store, of_visitor, name)
    if user is None and visitor is None and not choices and not events:
        what = "user, visitor or event with the id"
        raise EngageError(f"the workspace {workspace!r} has no {what} {name!r}")
    return _Facts(
        user=user,
        visitor=visitor,
        visitors=[x.anonymous_id for x in linked if x is not None and x.user_id == name],
        choices=choices,
        events=events,
    )


async def _newest(store: Storage, criteria: EventFilter, name: str) -> list[Event]:
    """Return the newest events that a filter wants and that have an id."""
    events: list[Event] = []
    cursor, end = None, time.monotonic() + _SEARCH_SECONDS
    while page := await store.recent(criteria, before=cursor, limit=_EVENTS - len(events)):
        matching = filter(criteria.matches, page.items)
        events += [event for event in matching if name in (event.user_id, event.anonymous_id)]
        cursor = page.cursor
        if cursor is None or len(events) == _EVENTS:
            break
        if time.monotonic() > end:
            warn("older events were not searched")
            break
    return events


@users.command("remove-trait", epilog=example("users remove-trait --workspace acme u-1 email plan"))
@on_instance(_WORKSPACE)
@click.option("--anonymous-id", is_flag=True, help="USER is the anonymous id of a visitor.")
@click.argument("user")
@click.argument("traits", metavar="TRAIT...", nargs=-1, required=True)
def remove_trait(
    instance: Instance, user: str, traits: tuple[str, ...], *, anonymous_id: bool
) -> None:
    """Remove traits of a user, or of a visitor.

    The user no longer has the traits, is not found by them, and has room for others, until a client
    sets them again. That is also true of traits that a visitor brought. The removal is an event,
    which `engage export events` shows.
    """
    kind = Kind.VISITOR if anonymous_id else Kind.USER
    whose = (instance.workspace.id, kind, user)
    removed = instance.run(remove_traits, *whose, traits, now=now())
    for trait in removed:
        print_cells("removed", trait)
    for trait in dict.fromkeys(traits):
        if trait not in removed:
            warn(f"the {kind} does not have the trait '{trait}'")
    if not removed:
        instance.ctx.exit(1)


def _link_command(name: str, text: str, *, linked: bool) -> None:
    """Make the command that restores or undoes a link."""
    epilog = example(f"users {name} --workspace acme --user u-1 --anonymous-id v-1")

    @users.command(name, help=text, epilog=epilog)
    @on_instance(_WORKSPACE)
    @click.option("--user", required=True, metavar="ID", help="The user.")
    @click.option("--anonymous-id", required=True, metavar="ID", help="The anonymous id.")
    def decide(instance: Instance, user: str, anonymous_id: str) -> None:
        ids = (instance.workspace.id, user, anonymous_id)
        instance.run(decide_link, *ids, linked=linked, now=now())
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
