# SPDX-License-Identifier: Apache-2.0
"""Mixpanel's two webhooks: cohort sync, and Real-Time Event Streams.

Mixpanel signs nothing: HTTP Basic or a header of your choice carries the secret, and only TLS
protects the body. Cohort sync expects a special answer. After a 401 it stops until it is started
again by hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from engage.api import (
    PayloadInvalid,
    Reply,
    TranslatedEvent,
    Translation,
    WebhookRequest,
    WebhookResult,
)
from engage.webhooks import (
    StaticCredentialProvider,
    at,
    content_id,
    email_recipient,
    event_id,
    iso_time,
    merged,
    message_id,
    parse_json,
    registration,
    text,
    track,
    translated,
    unix_time,
    user_id,
)

#: ``members`` is the whole cohort: the first time, and when Mixpanel starts again after errors.
_ACTIONS: Final[Mapping[str, str]] = {
    "members": "Cohort Entered",
    "add_members": "Cohort Entered",
    "remove_members": "Cohort Exited",
}
#: Prefix of the ids that Mixpanel gives to devices of unknown users.
_DEVICE: Final = "$device:"
#: A greater time is in milliseconds (in seconds it would be after the year 5000).
_SECONDS: Final = 100_000_000_000


class Mixpanel(StaticCredentialProvider):
    """Deliveries of a page of a cohort's members, or of a list of events."""

    setup = (
        "1. Choose a user name and a long random password, enter them in the options\n"
        "   basic_user and basic_password, and restart engage. (After a 401, Mixpanel pauses\n"
        "   the sync.)\n"
        "2. Mixpanel > Integrations > Webhooks (cohort sync): enter the URL with both."
    )

    def translate(self, request: WebhookRequest) -> Translation:
        """Return one track event for each member or event."""
        payload = parse_json(request.body, elements="parameters.members")
        if isinstance(payload, dict) and "action" in payload:
            return _cohort(payload)
        items = payload if isinstance(payload, list) else [payload]
        result = translated(items, _event)
        if result.rejected and not result.events:
            raise PayloadInvalid("neither members of a cohort nor a list of events")
        return result

    def reply(self, request: WebhookRequest, result: WebhookResult) -> Reply | None:
        """Return the answer that cohort sync expects, or ``None`` for other deliveries."""
        try:
            payload = parse_json(request.body, elements="parameters.members")
        except PayloadInvalid:
            return None
        action = at(payload, "action")
        if not isinstance(action, str) or action not in _ACTIONS:
            return None
        return Reply(body=orjson.dumps({"action": action, "status": "success"}))


def _cohort(payload: Mapping[str, Any]) -> Translation:
    action = payload["action"]
    members = at(payload, "parameters.members")
    if not isinstance(action, str) or action not in _ACTIONS or not isinstance(members, list):
        raise PayloadInvalid("not an action of cohort sync with its members")
    parameters = merged(payload["parameters"], without=["members", "page_info"])
    cohort = [
        text(parameters.get(f"mixpanel_{name}")) or ""
        for name in ("project_id", "cohort_id", "session_id")
    ]

    def event(member: Any, index: int) -> TranslatedEvent:
        distinct = user_id(at(member, "mixpanel_distinct_id"))
        recipient = email_recipient(at(member, "email"))
        if distinct is None and recipient is None:
            raise PayloadInvalid("a member without an id or an address")
        who = distinct or (recipient.value if recipient else "")
        document = track(
            _ACTIONS[action],
            message_id=event_id(*cohort, action, who),
            # Mixpanel does not say when a member entered or left.
            timestamp=None,
            properties=merged(
                {"email": recipient.value if recipient else None},
                parameters,
                member,
                without=["mixpanel_distinct_id"],
            ),
        )
        _identify(document, distinct)
        return TranslatedEvent(document, recipient, index)

    return translated(members, event, [action])


def _event(item: Any, index: int) -> TranslatedEvent:
    name = text(at(item, "event")) or text(at(item, "event_name"))
    if name is None:
        raise PayloadInvalid("not an event")
    nested = item.get("properties")
    own = merged(nested, item, without=["properties", "event", "event_name"])
    fields = {"distinct_id", "$insert_id", "insert_id", "$user_id", "$device_id"}
    timestamp = _time(own.get("time"))
    if timestamp is not None:
        fields.add("time")
    distinct = user_id(own.get("$user_id"), own.get("distinct_id"))
    recipient = email_recipient(own.get("$email"), own.get("email"))
    document = track(
        name,
        message_id=message_id(own.get("$insert_id"), own.get("insert_id")) or content_id(item),
        timestamp=timestamp,
        properties=merged(own, without=fields),
    )
    _identify(document, distinct)
    device = user_id(own.get("$device_id"))
    if device is not None:
        document["anonymousId"] = device
    return TranslatedEvent(document, recipient, index)


def _identify(document: dict[str, Any], distinct: str | None) -> None:
    if distinct is None:
        return
    if distinct.startswith(_DEVICE) and len(distinct) > len(_DEVICE):
        document["anonymousId"] = distinct.removeprefix(_DEVICE)
    else:
        document["userId"] = distinct


def _time(value: object) -> str | None:
    """Read seconds or milliseconds since 1970, or a date and time."""
    if isinstance(value, str) and not (value.isascii() and value.isdigit()):
        return iso_time(value)
    if isinstance(value, str) and len(value) <= 15:
        value = int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and value > _SECONDS:
        value = value / 1000
    return unix_time(value)


engage_register_webhook = registration("mixpanel", Mixpanel)
