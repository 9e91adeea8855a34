# SPDX-License-Identifier: Apache-2.0
"""PostHog's HTTP Webhook destination.

PostHog signs nothing: the secret is a header of your own, and only TLS protects the body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from engage.api import (
    PayloadInvalid,
    ProviderFactory,
    Register,
    TranslatedEvent,
    Translation,
    WebhookRequest,
    hookimpl,
)
from engage.webhooks import (
    StaticCredentialProvider,
    at,
    content_id,
    email_recipient,
    iso_time,
    merged,
    message_id,
    options_schema,
    parse_object,
    text,
    user_id,
)

#: posthog-js makes an id of this form for a visitor whom nobody has identified.
_VISITOR: Final = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE
)
#: Events that say of an id that it is a user's.
_OF_USERS: Final = frozenset({"$identify", "$create_alias", "$merge_dangerously"})
#: The property of a page → PostHog's.
_PAGE: Final = {
    "url": "$current_url",
    "path": "$pathname",
    "title": "title",
    "referrer": "$referrer",
}


class PostHog(StaticCredentialProvider):
    """One event a delivery: the default body, ``{"event": {event}, "person": {person}}``."""

    setup = (
        "PostHog > Data pipelines > Destinations > HTTP Webhook: paste the URL, leave "
        "the body as it is.\n"
        "Nothing is signed: add a header with a long random value there (options header, "
        "value)."
    )

    def translate(self, request: WebhookRequest) -> Translation:
        """Autocaptured events become page, screen, identify, group or alias; others track."""
        payload = parse_object(request.body)
        # A body of just ``{event}`` is the event itself.
        nested = isinstance(payload.get("event"), dict)
        event = payload["event"] if nested else payload
        person = payload.get("person")
        name = text(event.get("event"))
        if name is None:
            raise PayloadInvalid("the body has no event with a name")
        document = _document(name, event, person)
        # What is no part of the event (the project, groups) is kept with it.
        rest = merged(payload, without=["event", "person"]) if nested else {}
        extra = merged(_rest(event, nested), {"person": person}, rest)
        if extra:
            document["properties"] = merged(document.get("properties"), {"posthog": extra})
        recipient = email_recipient(
            at(person, "properties.email"), at(event, "properties.$set.email")
        )
        return Translation(events=[TranslatedEvent(document, recipient)])


def _document(name: str, event: Mapping[str, Any], person: object) -> dict[str, Any]:
    properties = _object(event.get("properties"))
    distinct = user_id(event.get("distinct_id"))
    document: dict[str, Any] = {
        "messageId": message_id(event.get("uuid")) or content_id(event),
        "context": merged(
            {"source": "webhook", "provider": "PostHog", "ip": text(properties.get("$ip"))}
        ),
    }
    timestamp = iso_time(event.get("timestamp"))
    if timestamp is not None:
        document["timestamp"] = timestamp
    used = {"$ip"}
    if name in _OF_USERS:
        document["userId"] = distinct
    elif distinct is not None and _is_visitor(distinct, properties, person):
        document["anonymousId"] = distinct
    else:
        document["userId"] = distinct

    if name in ("$pageview", "$pageleave"):
        document["type"] = "page"
        title = text(properties.get("title"))
        if title is not None:
            document["name"] = title
        page = {key: properties.get(source) for key, source in _PAGE.items()}
        document["properties"] = merged(page, {"event": name}, properties, without=used)
    elif name == "$screen":
        used.add("$screen_name")
        document["type"] = "screen"
        document["name"] = text(properties.get("$screen_name"))
        document["properties"] = merged(properties, without=used)
    elif name in ("$identify", "$set"):
        used |= {"$set", "$set_once", "$anon_distinct_id"}
        document["type"] = "identify"
        # A trait that is null was taken away: it is kept as null.
        document["traits"] = {
            **_object(properties.get("$set_once")),
            **_object(properties.get("$set")),
        }
        anonymous = user_id(properties.get("$anon_distinct_id"))
        if distinct is not None and anonymous is not None and anonymous != distinct:
            document["anonymousId"] = anonymous
        document["properties"] = merged(properties, without=used)
    elif name == "$groupidentify" and user_id(properties.get("$group_key")) is not None:
        used |= {"$group_key", "$group_set"}
        document["type"] = "group"
        document["groupId"] = text(properties.get("$group_key"))
        document["traits"] = dict(_object(properties.get("$group_set")))
        document["properties"] = merged(properties, without=used)
        if distinct == f"${properties.get('$group_type')}_{document['groupId']}":
            # What the server libraries send for "no user in particular".
            document.pop("userId", None)
            document["anonymousId"] = distinct
    elif name in ("$create_alias", "$merge_dangerously") and _aliased(properties, distinct):
        used.add("alias")
        document["type"] = "alias"
        document["previousId"] = text(properties["alias"])
        if _VISITOR.fullmatch(str(distinct)) and not _VISITOR.fullmatch(document["previousId"]):
            # Some libraries name the visitor first, others the user.
            document["userId"], document["previousId"] = document["previousId"], distinct
        document["properties"] = merged(properties, without=used)
    else:
        document["type"] = "track"
        document["event"] = name
        document["properties"] = merged(properties, without=used)
    return {key: value for key, value in document.items() if value is not None}


def _is_visitor(distinct: str, properties: Mapping[str, Any], person: object) -> bool:
    """:return: whether PostHog keeps no person for this id."""
    if properties.get("$process_person_profile") is False:
        return True
    return person is None and _VISITOR.fullmatch(distinct) is not None


def _aliased(properties: Mapping[str, Any], distinct: str | None) -> bool:
    alias = user_id(properties.get("alias"))
    return alias is not None and distinct is not None and alias != distinct


def _rest(event: Mapping[str, Any], nested: bool) -> dict[str, Any]:
    """What of the event has no field of its own.

    An empty ``elements_chain`` says nothing.
    """
    fields = ["event", "uuid", "distinct_id", "properties", "timestamp", "person"]
    return {
        key: value
        for key, value in merged(event, without=fields).items()
        if value != "" or not nested
    }


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


@hookimpl
def engage_register_webhook(register: Register[ProviderFactory]) -> None:
    """Bring ``posthog``."""
    register("posthog", PostHog, options_schema("engage_schemas", "plugins/webhooks/posthog.json"))
