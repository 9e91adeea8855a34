# SPDX-License-Identifier: Apache-2.0
"""What the stored events of a user say of it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

import orjson

from engage.api import (
    API_ORIGIN,
    OPERATOR_ORIGIN,
    RECIPIENT_PREFIXES,
    REMOVED,
    TRUSTED,
    Event,
    EventFilter,
    Kind,
    Link,
    LinkDecision,
    Membership,
    RemovedTraits,
    Seen,
    Traits,
    certain_of,
    changes_of,
    engage_mark,
    identifier_value,
)
from engage.config import Workspace
from engage.keys.effective import list_keys
from engage.reading.scans import all_pages
from engage.store.facade import Storage

__all__ = ["ADDRESSES", "Own", "found_address", "own_events"]

#: The traits that are addresses.
ADDRESSES: Final = frozenset(prefix.removesuffix(":") for prefix in RECIPIENT_PREFIXES)


class Own(NamedTuple):
    """What the stored events of a user say of it, apart from its visitors."""

    #: The first link to each anonymous id that a server key or an operator made, and no operator
    #: undid: when it was received, message id and origin.
    links: Mapping[str, tuple[int, str, str]]
    #: Address → number of the deliveries whose user was found by it.
    found_by: Mapping[str, int]
    traits: Mapping[str, Any]
    #: As :attr:`UserProfile.certain`. Events of earlier versions have no mark: they count if their
    #: key is a server key now.
    certain: Mapping[str, str]
    groups: Collection[str]
    #: The greatest timestamp of an event that made the user exist.
    updated_at: int


async def own_events(
    store: Storage,
    workspace: Workspace,
    user_id: str,
    addresses: Collection[str] | None = None,
) -> Own:
    """Return what the stored events of a user say of it.

    :param addresses: those of the person: deliveries that were found by another one say nothing.
        ``None``: all say something.
    """
    keys = (await list_keys(store, [workspace])).keys
    servers = {key.id for key in keys if (key.workspace_id, key.kind) == (workspace.id, "server")}
    links: dict[str, tuple[int, str, str]] = {}
    found_by, updated_at = Counter[str](), 0
    registers: dict[tuple[str, str], tuple[Any, Any]] = {}
    criteria = EventFilter(workspace_id=workspace.id, user_id=user_id)
    async for event in all_pages(functools.partial(store.scan, criteria)):
        if not criteria.matches(event):
            continue
        if address := found_address(event.origin, event.body):
            found_by[address] += 1
            if addresses is not None and address not in addresses:
                continue
        version, values = (event.timestamp, event.message_id, event.origin), dict[Any, Any]()
        for change in changes_of(event):
            match change:
                case Seen(Kind.USER, _):
                    updated_at = max(updated_at, event.timestamp)
                case Traits(Kind.USER, _, traits):
                    values |= {("trait", name): value for name, value in traits.items()}
                    if b'"trusted"' not in event.body and _is_sent_by(event, servers):
                        values |= {
                            ("trait", f"{TRUSTED}:{name}"): identifier_value(name, traits[name])
                            for name in ADDRESSES & traits.keys()
                        }
                case RemovedTraits(Kind.USER, _, names):
                    values |= {("trait", name): REMOVED for name in names}
                case Membership(Kind.USER, _, name, assigned):
                    values["group", name] = assigned
                case LinkDecision(_, name, counts):
                    values["link", name] = counts
                case Link(_, name) if _is_sure(event, name, servers):
                    link = (event.received_at, event.message_id, event.origin)
                    links[name] = min(link, links.get(name, link))
        for key, value in values.items():
            if key not in registers or registers[key][0] < version:
                registers[key] = (version, value)
    latest = {key: value for key, (_, value) in registers.items()}
    all_traits = {name: value for (of, name), value in latest.items() if of == "trait"}
    return Own(
        links={name: link for name, link in links.items() if latest.get(("link", name), True)},
        found_by=found_by,
        traits={
            name: value
            for name, value in all_traits.items()
            if value is not REMOVED and not name.startswith(TRUSTED)
        },
        certain=certain_of(all_traits, ADDRESSES),
        groups={name for (of, name), member in latest.items() if of == "group" and member},
        updated_at=updated_at,
    )


def _is_sure(event: Event, anonymous_id: str, servers: Collection[str]) -> bool:
    """Return whether an event that links an anonymous id to a user cannot be anyone's claim."""
    if event.type not in ("identify", "alias"):  # A server passes on the cookies of browsers.
        return False
    if event.type == "alias" and event.document().get("previousId") != anonymous_id:
        return False
    return event.origin == OPERATOR_ORIGIN or _is_sent_by(event, servers)


def _is_sent_by(event: Event, keys: Collection[str]) -> bool:
    return event.origin == API_ORIGIN and event.document().get("writeKeyId") in keys


def found_address(origin: str, body: bytes) -> str | None:
    """Return the address by which engage found whose a delivery is, if it is one."""
    if origin in (API_ORIGIN, OPERATOR_ORIGIN) or b'"foundBy"' not in body:
        return None
    address = engage_mark(orjson.loads(body)).get("foundBy")
    return address if isinstance(address, str) else None
