# SPDX-License-Identifier: Apache-2.0
"""Applies what providers report about subscriptions, as the config of the workspace says.

A report changes the choices of the user whose id the provider sent with it. Without one, it
suppresses the address: no user is looked up, because anyone can claim an address with a public key.
Complaints, hard bounces, STOP and START are of the address in any case.

A report may be applied again, in any order: its change has the id of its event, which the storage
remembers, and the time of the event, after which another choice of the person stays. A suppression
is a register, of which the latest counts.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import orjson

from engage.api import (
    EventStore,
    OptOut,
    SubscriptionChange,
    SubscriptionStore,
    Suppression,
    SuppressionStore,
    TranslatedEvent,
    suppressed_address,
)
from engage.deliveries.recipients import LOOKUP
from engage.pipeline.normalise import parse_field
from engage.upkeep.time_limit import within

if TYPE_CHECKING:
    from engage.config import Unsubscribes, Workspace

__all__ = ["Effects", "OptOuts", "effects"]

#: Kinds of reports that are of the address, also if the provider names a user.
_OF_ADDRESS: Final = frozenset({"complaint", "bounce", "stop", "start"})
#: Kinds that only the address has, because START must be able to undo all that STOP did.
_ANSWERS: Final = frozenset({"stop", "start"})

#: Namespace of the ids of changes.
_NAMESPACE: Final = uuid.UUID("7d0b4f0a-0f3c-5c55-9a55-2c3d8f1e6b61")


@dataclasses.dataclass(frozen=True, slots=True)
class Effects:
    """What the events of a delivery change."""

    changes: list[SubscriptionChange] = dataclasses.field(default_factory=list)
    suppressions: list[Suppression] = dataclasses.field(default_factory=list)


class OptOuts:
    """Applies the reports of deliveries.

    :param store: a :class:`SubscriptionStore` and :class:`SuppressionStore` if a workspace has an
        action, which is checked when the server starts.
    :param timeout: seconds that a storage call may take.
    """

    def __init__(self, workspaces: Iterable[Workspace], store: EventStore, timeout: float) -> None:
        self._workspaces = {workspace.id: workspace for workspace in workspaces}
        self._store = store
        self._timeout = timeout

    async def apply(
        self,
        workspace_id: str,
        provider: str,
        reports: Sequence[tuple[TranslatedEvent, Mapping[str, Any]]],
        *,
        now: int,
    ) -> int:
        """Apply what events report, and return when it is durable. Idempotent.

        :param reports: events that are durable, each with the document that was stored.
        :param now: milliseconds since 1970 UTC; no report is later.
        :return: how many changes and suppressions there are.
        :raises StorageUnavailable: if not everything is durable.
        """
        workspace, store, applied = self._workspaces[workspace_id], self._store, 0
        if provider not in workspace.unsubscribes:
            return 0
        reports = [report for report in reports if report[0].opt_outs]
        # In parts, between which the event loop does other work.
        for start in range(0, len(reports), LOOKUP):
            found = Effects()
            for event, document in reports[start : start + LOOKUP]:
                at = await self._time(workspace_id, provider, event, document, now)
                effects(workspace, provider, event, at, found)
            async with within(self._timeout):
                if found.changes:
                    assert isinstance(store, SubscriptionStore)
                    await store.apply_all(found.changes)
                if found.suppressions:
                    assert isinstance(store, SuppressionStore)
                    await store.suppress(found.suppressions)
            applied += len(found.changes) + len(found.suppressions)
        return applied

    async def _time(
        self,
        workspace_id: str,
        provider: str,
        event: TranslatedEvent,
        document: Mapping[str, Any],
        now: int,
    ) -> int:
        """Return when an event happened; for one without a time, when it arrived first."""
        if not event.document.get("timestamp"):
            async with within(self._timeout):
                stored = await self._store.find(
                    workspace_id, provider, str(event.document["messageId"])
                )
            if stored is not None:
                return min(stored.timestamp, now)
        # With a log, the event may not be in the store yet.
        return min(parse_field({**document}, "timestamp"), now) if "timestamp" in document else now


def effects(
    workspace: Workspace,
    provider: str,
    event: TranslatedEvent,
    at: int,
    found: Effects,
) -> None:
    """Add what an event changes.

    :param at: when the event happened: milliseconds since 1970 UTC.
    :param found: gets it.
    """
    rule = workspace.unsubscribes.get(provider)
    if rule is None or rule.action == "none":
        return
    # The user of a document that was identified may be one who claimed the address.
    user, message_id = event.document.get("userId"), str(event.document["messageId"])
    left: dict[str, bool] = {}
    for opt_out in event.opt_outs:
        groups = _groups(workspace, rule, opt_out)
        if user and opt_out.kind not in _ANSWERS:
            left |= dict.fromkeys(groups, False)
        address = _address(event, opt_out.channel)
        if address is None or (user and opt_out.kind not in _OF_ADDRESS):
            continue
        found.suppressions.extend(
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
            for group in ([""] if rule.action == "channel" else groups)
        )
    if left:
        content = orjson.dumps([workspace.id, provider, message_id]).decode()
        found.changes.append(
            SubscriptionChange(
                id=str(uuid.uuid5(_NAMESPACE, content)),
                workspace_id=workspace.id,
                user_id=str(user),
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


def _address(event: TranslatedEvent, channel: str) -> str | None:
    """Return the address that a report is about, if it is known and one of the channel."""
    recipient = event.recipient
    if recipient is None or (recipient.trait == "email") != (channel == "email"):
        return None
    return suppressed_address(channel, recipient.value)
