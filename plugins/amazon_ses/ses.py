# SPDX-License-Identifier: Apache-2.0
"""Translates an event of SES: what happened to an e-mail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engage.api import OptOut, PayloadInvalid, Translation
from engage.webhooks import (
    at,
    email_event,
    email_opt_outs,
    email_recipient,
    email_recipients,
    event_id,
    iso_time,
    merged,
    message_id,
    own_user_id,
    text,
    track,
)

__all__ = ["translate"]

_NAMES: Final[Mapping[str, str]] = {
    "Send": "Email Sent",
    "Delivery": "Email Delivered",
    "Open": "Email Opened",
    "Click": "Email Link Clicked",
    "Bounce": "Email Bounced",
    "Complaint": "Email Marked as Spam",
    "DeliveryDelay": "Email Delayed",
    "Reject": "Email Dropped",
    "Rendering Failure": "Email Dropped",
    "Subscription": "Email Unsubscribed",
}
#: Kind → the field with its details, if that is not the kind in lower case.
_DETAILS: Final[Mapping[str, str]] = {
    "Rendering Failure": "failure",
    "DeliveryDelay": "deliveryDelay",
}
#: Kind → the field of the details that lists the recipients whom the event is about.
_RECIPIENTS: Final[Mapping[str, str]] = {
    "Bounce": "bouncedRecipients",
    "Complaint": "complainedRecipients",
    "Delivery": "recipients",
    "DeliveryDelay": "delayedRecipients",
}
_BOUNCES: Final[Mapping[str, str]] = {
    "Permanent": "hard",
    "Transient": "soft",
    "Undetermined": "undetermined",
}
#: Types of feedback reports that say nothing against the mail, or were not made by the person.
_NOT_COMPLAINTS: Final = frozenset({"not-spam", "auth-failure"})
#: Fields of the SNS message that are not kept: those that were translated, and the URL with which
#: anyone who reads the event could end the subscription.
_NOT_KEPT: Final = frozenset(
    {"Message", "Signature", "SignatureVersion", "SigningCertURL", "Type", "UnsubscribeURL"}
)


def translate(event: Mapping[str, Any], message: Mapping[str, Any]) -> Translation:
    """Return one track event for each recipient that an event of SES is about.

    :param message: the SNS message that contained the event.
    :raises PayloadInvalid: if it is not an event of SES.
    """
    kind = text(event.get("eventType")) or text(event.get("notificationType"))
    if kind is None:
        raise PayloadInvalid("the message is not an event of SES")
    if kind not in _NAMES:
        return Translation(ignored=1, unknown={0: event}, types=[kind])
    mail = _object(event.get("mail"))
    details = _object(event.get(_DETAILS.get(kind, kind.lower())))
    tags = {
        name: values[0]
        for name, values in _object(mail.get("tags")).items()
        if isinstance(values, list) and values
    }
    user, taken = own_user_id(tags)
    listed = _texts(details.get(_RECIPIENTS.get(kind, "")))
    # The tags are the mail's: with a user, there is one event, even if it has several addresses.
    # SES does not know which of several recipients opened a mail.
    named = listed if user is None and listed else [listed or _list(mail.get("destination"))]
    delivery = message_id(message["MessageId"]) or event_id(message["MessageId"])
    events = []
    for index, addresses in enumerate(named):
        recipient = email_recipient(addresses)
        properties = merged(
            {"email": recipient.value if recipient else None, "bounceType": _bounce(details)},
            event,
            # SES's own tags, such as ses:source-ip, stay among the tags of the mail.
            {name: value for name, value in tags.items() if ":" not in name},
            {"sns": merged(message, without=_NOT_KEPT)},
            without=taken,
        )
        document = track(
            _subscription(details) if kind == "Subscription" else _NAMES[kind],
            message_id=delivery if index == 0 else event_id(delivery, str(index)),
            timestamp=iso_time(details.get("timestamp")) or iso_time(mail.get("timestamp")),
            user=user,
            properties=properties,
        )
        opt_outs = _opt_outs(document["event"], details)
        events.append(email_event(document, addresses, opt_outs, one_of=not listed, taken=taken))
    return Translation(events=events, types=[kind])


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(listed: object) -> list[Any]:
    """Return the addresses in a list, each once; what it has instead if none can be read."""
    texts = [at(item, "emailAddress") or item for item in _list(listed)]
    return [recipient.value for recipient in email_recipients(texts)] or texts


def _bounce(details: Mapping[str, Any]) -> str | None:
    return _BOUNCES.get(str(details.get("bounceType")))


def _opt_outs(name: str, details: Mapping[str, Any]) -> tuple[OptOut, ...]:
    """Return what an event says about subscriptions; the topics of the contact list are groups."""
    if text(details.get("complaintFeedbackType")) in _NOT_COMPLAINTS:
        return ()
    if name != "Email Unsubscribed":
        return email_opt_outs(name, _bounce(details))
    new, old = (_object(details.get(f"{age}TopicPreferences")) for age in ("new", "old"))
    if new.get("unsubscribeAll") is not False:
        return email_opt_outs(name, None)
    # The preferences are all that the person has: a topic that was left earlier is not left now.
    topics = sorted(_left(new) - _left(old))
    return email_opt_outs(name, None, *topics) if topics else ()


def _left(preferences: Mapping[str, Any]) -> set[str]:
    """Return the topics that a person does not want."""
    listed = map(_object, _list(preferences.get("topicSubscriptionStatus")))
    return {
        str(topic["topicName"])
        for topic in listed
        if topic.get("subscriptionStatus") == "OptOut" and text(topic.get("topicName"))
    }


def _subscription(details: Mapping[str, Any]) -> str:
    """Return the name for a change of preferences; the preferences after the change decide."""
    preferences = _object(details.get("newTopicPreferences"))
    listed = _list(preferences.get("topicSubscriptionStatus"))
    statuses = [_object(topic).get("subscriptionStatus") for topic in listed]
    if preferences.get("unsubscribeAll") is False and "OptOut" not in statuses:
        return "Email Resubscribed"
    return "Email Unsubscribed"
