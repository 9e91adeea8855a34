# SPDX-License-Identifier: Apache-2.0
"""Applies what providers report about subscriptions, as the config of the workspace says.

A report with the user id that came with the message changes the choices of that user if an address
that it names is, or ever was, the user's, if engage knows no address of the user for the channel,
or if it names none. Each other address that it names is suppressed: a copy of the message may have
gone there. No user is looked up by an address, because anyone can claim one with a public key.
Complaints, hard bounces, STOP and START suppress the address in any case.

A report may be applied again, in any order: its change has the id of its event, which the storage
remembers, and the time of the event, after which another choice of the person stays. A suppression
is a register, of which the latest counts.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from engage.api import (
    ADDRESS_TRAITS,
    Kind,
    OptOut,
    Subject,
    SubscriptionChange,
    Suppression,
    TranslatedEvent,
    suppressed_address,
)
from engage.reading.time_limit import within
from engage.store.facade import Storage
from engage.subscriptions.recipients import LOOKUP
from engage.times import parse_field

if TYPE_CHECKING:
    from engage.config import Unsubscribes, Workspace

__all__ = ["Effects", "Owned", "apply_reports", "effects", "owned_addresses"]

#: Kinds of reports that are of the address, also if the provider names a user.
_OF_ADDRESS: Final = frozenset({"complaint", "bounce", "stop", "start"})
#: Kinds that only the address has, because START must be able to undo all that STOP did.
_ANSWERS: Final = frozenset({"stop", "start"})

#: Trait and user id → the addresses that are, or ever were, the user's.
Owned = Mapping[tuple[str, str], Collection[str]]

#: Namespace of the ids of changes.
_NAMESPACE: Final = uuid.UUID("7d0b4f0a-0f3c-5c55-9a55-2c3d8f1e6b61")


@dataclasses.dataclass(frozen=True, slots=True)
class Effects:
    """What the events of a delivery change."""

    changes: list[SubscriptionChange] = dataclasses.field(default_factory=list)
    suppressions: list[Suppression] = dataclasses.field(default_factory=list)


async def apply_reports(
    store: Storage,
    workspace: Workspace,
    provider: str,
    reports: Sequence[tuple[TranslatedEvent, Mapping[str, Any]]],
    *,
    now: int,
    seconds: float,
) -> int:
    """Apply what events report, and return when it is durable. Idempotent.

    :param provider: the name of the provider that reports.
    :param reports: events that are durable, each with the document that was stored.
    :param now: milliseconds since 1970 UTC; no report is later.
    :param seconds: how long a storage call may take.
    :return: how many changes and suppressions there are.
    :raises StorageUnavailable: if not everything is durable.
    """
    applied = 0
    if provider not in workspace.unsubscribes:
        return 0
    reports = [report for report in reports if report[0].opt_outs]
    # In parts, between which the event loop does other work.
    for start in range(0, len(reports), LOOKUP):
        made, part = Effects(), reports[start : start + LOOKUP]
        async with within(seconds):
            owned = await owned_addresses(store, workspace.id, [event for event, _ in part])
        for event, document in part:
            at, message_id = now, str(event.document["messageId"])
            stored = None
            if not event.document.get("timestamp"):
                # One without a time happened when it arrived first.
                async with within(seconds):
                    stored = await store.find(workspace.id, provider, message_id)
            if stored is not None:
                at = min(stored.timestamp, now)
            elif "timestamp" in document:  # With a log, the event may not be in the store yet.
                at = min(parse_field({**document}, "timestamp"), now)
            effects(workspace, provider, event, at, made, owned)
        async with within(seconds):
            if made.changes:
                await store.apply_all(made.changes)
            if made.suppressions:
                await store.suppress(made.suppressions)
        applied += len(made.changes) + len(made.suppressions)
    return applied


async def owned_addresses(
    store: Storage, workspace_id: str, events: Sequence[TranslatedEvent]
) -> Owned:
    """Return the addresses of the users whose ids came with reports.

    :raises StorageUnavailable: if they could not be read.
    """
    asked: dict[str, set[str]] = {}
    for event in events:
        for opt_out in event.opt_outs:
            if (user := event.document.get("userId")) and opt_out.channel in ADDRESS_TRAITS:
                asked.setdefault(ADDRESS_TRAITS[opt_out.channel], set()).add(str(user))
    return {
        (trait, user): addresses
        for trait, users in asked.items()
        for user, addresses in (
            await store.identifier_history(workspace_id, trait, sorted(users))
        ).items()
    }


def effects(
    workspace: Workspace,
    provider: str,
    event: TranslatedEvent,
    at: int,
    made: Effects,
    owned: Owned,
) -> None:
    """Add what an event changes.

    :param at: when the event happened: milliseconds since 1970 UTC.
    :param made: gets it.
    :param owned: of the user whom the event names.
    """
    rule = workspace.unsubscribes.get(provider)
    if rule is None or rule.action == "none":
        return
    # The user of a document that was identified may be one who claimed the address.
    user, message_id = event.document.get("userId"), str(event.document["messageId"])
    left: dict[str, bool] = {}
    for opt_out in event.opt_outs:
        groups = _groups(workspace, rule, opt_out)
        named = _addresses(event, opt_out.channel)
        own = owned.get((ADDRESS_TRAITS.get(opt_out.channel, ""), str(user)), ())
        others = [] if user and not own else [x for x in named if not user or x not in own]
        if user and opt_out.kind not in _ANSWERS and (not named or len(others) < len(named)):
            left |= dict.fromkeys(groups, False)
        made.suppressions.extend(
            Suppression(
                workspace_id=workspace.id,
                channel=opt_out.channel,
                address=address,
                group_id=group,
                reason="stop" if opt_out.kind == "start" else opt_out.kind,
                at=at,
                lifted=opt_out.kind == "start",
                how=f"webhook:{provider}",
                source_id=message_id,
            )
            for address in (named if opt_out.kind in _OF_ADDRESS else others)
            for group in ([""] if rule.action == "channel" else groups)
        )
    if left:
        content = orjson.dumps([workspace.id, provider, message_id]).decode()
        made.changes.append(
            SubscriptionChange(
                id=str(uuid.uuid5(_NAMESPACE, content)),
                workspace_id=workspace.id,
                subject=Subject(Kind.USER, str(user)),
                choices=left,
                at=at,
                how=f"webhook:{provider}",
                dated=True,
            )
        )


def _groups(workspace: Workspace, rule: Unsubscribes, opt_out: OptOut) -> list[str]:
    """Return the ids of the subscription groups that a report is about."""
    if rule.action == "channel":
        groups = workspace.subscription_groups
        return [group.id for group in groups if group.channel == opt_out.channel]
    named = opt_out.groups or rule.groups
    return sorted({rule.groups[group] for group in named if group in rule.groups})


def _addresses(event: TranslatedEvent, channel: str) -> list[str]:
    """Return the addresses that a report is about, as far as they are of the channel."""
    recipients = [event.recipient] if event.named is None else event.named
    addresses = [
        suppressed_address(channel, recipient.value)
        for recipient in recipients
        if recipient is not None and (recipient.trait == "email") == (channel == "email")
    ]
    return [*dict.fromkeys(address for address in addresses if address is not None)]
