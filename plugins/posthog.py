# SPDX-License-Identifier: Apache-2.0
"""PostHog's HTTP Webhook destination.

PostHog signs nothing: a header of your choice carries the secret, and only TLS protects the body.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from engage.api import PayloadInvalid, TranslatedEvent, Translation, WebhookRequest
from engage.webhooks import (
    StaticCredentialProvider,
    at,
    content_id,
    email_recipient,
    iso_time,
    merged,
    message_id,
    parse_object,
    registration,
    text,
    user_id,
)

#: posthog-js generates an id of this form for a visitor who is not identified.
_VISITOR: Final = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", re.IGNORECASE
)
#: Events whose ``distinct_id`` is a user's.
_OF_USERS: Final = frozenset({"$identify", "$create_alias", "$merge_dangerously"})
#: The property of a page → PostHog's.
_PAGE: Final = {
    "url": "$current_url",
    "path": "$pathname",
    "title": "title",
    "referrer": "$referrer",
}


class PostHog(StaticCredentialProvider):
    """Deliveries with the default body, ``{"event": {event}, "person": {person}}``: one event."""

    setup = (
        "1. Choose a long random value, enter it in the option value, and restart engage.\n"
        "2. PostHog > Data pipelines > Destinations > HTTP Webhook: enter the URL, add the\n"
        "   header Authorization with that value, and leave the body as it is."
    )

    def translate(self, request: WebhookRequest) -> Translation:
        """Return a page, screen, identify, group or alias for PostHog's own events, else track."""
        payload = parse_object(request.body)
        # If the body is just ``{event}``, it is the event itself.
        nested = isinstance(payload.get("event"), dict)
        event = payload["event"] if nested else payload
        person = payload.get("person")
        name = text(event.get("event"))
        if name is None:
            raise PayloadInvalid("the body has no event with a name")
        document = _document(name, event, person)
        # The rest of the body (the project, groups) is kept with the event.
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
    is_visitor = (
        name not in _OF_USERS and distinct is not None and _is_visitor(distinct, properties, person)
    )
    document: dict[str, Any] = {
        "messageId": message_id(event.get("uuid")) or content_id(event),
        "context": merged(
            {"source": "webhook", "provider": "PostHog", "ip": text(properties.get("$ip"))}
        ),
        "timestamp": iso_time(event.get("timestamp")),
        "anonymousId" if is_visitor else "userId": distinct,
    }
    special = _SPECIAL.get(name)
    translated = None if special is None else special(name, properties, distinct)
    if translated is None:
        translated = _Translated({"type": "track", "event": name})
    document.update(translated.fields)
    document["properties"] = merged(translated.first, properties, without={"$ip", *translated.used})
    return {key: value for key, value in document.items() if value is not None}


@dataclasses.dataclass(frozen=True, slots=True)
class _Translated:
    """The translation of one kind of event."""

    #: Fields of the document; ``None`` removes one that every event has.
    fields: Mapping[str, Any]
    #: Properties that have become such a field.
    used: Collection[str] = ()
    #: Additional properties; they take precedence over PostHog's.
    first: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _page(name: str, properties: Mapping[str, Any], distinct: str | None) -> _Translated:
    page = {key: properties.get(source) for key, source in _PAGE.items()}
    fields = {"type": "page", "name": text(properties.get("title"))}
    return _Translated(fields, first=merged(page, {"event": name}))


def _screen(name: str, properties: Mapping[str, Any], distinct: str | None) -> _Translated:
    fields = {"type": "screen", "name": text(properties.get("$screen_name"))}
    return _Translated(fields, {"$screen_name"})


def _identify(name: str, properties: Mapping[str, Any], distinct: str | None) -> _Translated:
    fields: dict[str, Any] = {
        "type": "identify",
        # A trait that is null has been removed: it stays null.
        "traits": {
            **_object(properties.get("$set_once")),
            **_object(properties.get("$set")),
        },
    }
    anonymous = user_id(properties.get("$anon_distinct_id"))
    if distinct is not None and anonymous is not None and anonymous != distinct:
        fields["anonymousId"] = anonymous
    return _Translated(fields, {"$set", "$set_once", "$anon_distinct_id"})


def _group(name: str, properties: Mapping[str, Any], distinct: str | None) -> _Translated | None:
    if user_id(properties.get("$group_key")) is None:
        return None
    group = text(properties.get("$group_key"))
    fields: dict[str, Any] = {
        "type": "group",
        "groupId": group,
        "traits": dict(_object(properties.get("$group_set"))),
    }
    if distinct == f"${properties.get('$group_type')}_{group}":
        # The server libraries send this id for an event that belongs to no user.
        fields |= {"userId": None, "anonymousId": distinct}
    return _Translated(fields, {"$group_key", "$group_set"})


def _alias(name: str, properties: Mapping[str, Any], distinct: str | None) -> _Translated | None:
    alias = user_id(properties.get("alias"))
    if alias is None or distinct is None or alias == distinct:
        return None
    # Some libraries name the visitor first, others the user.
    if _VISITOR.fullmatch(distinct) and not _VISITOR.fullmatch(alias):
        alias, distinct = distinct, alias
    return _Translated({"type": "alias", "userId": distinct, "previousId": alias}, {"alias"})


#: Event → its translation; ``None`` if it is a track event after all.
_SPECIAL: Final[
    Mapping[str, Callable[[str, Mapping[str, Any], str | None], _Translated | None]]
] = {
    "$pageview": _page,
    "$pageleave": _page,
    "$screen": _screen,
    "$identify": _identify,
    "$set": _identify,
    "$groupidentify": _group,
    "$create_alias": _alias,
    "$merge_dangerously": _alias,
}


def _is_visitor(distinct: str, properties: Mapping[str, Any], person: object) -> bool:
    """Return whether PostHog has no person for this id."""
    if properties.get("$process_person_profile") is False:
        return True
    return person is None and _VISITOR.fullmatch(distinct) is not None


def _rest(event: Mapping[str, Any], nested: bool) -> dict[str, Any]:
    """Return the fields of an event that have no field here.

    PostHog sends an empty ``elements_chain`` with every nested event; it is left out.
    """
    fields = ["event", "uuid", "distinct_id", "properties", "timestamp", "person"]
    return {
        key: value
        for key, value in merged(event, without=fields).items()
        if value != "" or not nested
    }


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


engage_register_webhook = registration("posthog", PostHog)
