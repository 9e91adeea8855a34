# SPDX-License-Identifier: Apache-2.0
"""Stripe: customers become users, and everything else becomes a track event.

Most objects contain only the customer's id. The trait ``stripeCustomerId`` says whose it is: every
identify of a customer sets it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from engage.api import (
    PayloadInvalid,
    ProviderContext,
    Recipient,
    SignatureMismatch,
    Signing,
    TranslatedEvent,
    Translation,
    WebhookRequest,
)
from engage.webhooks import (
    SecretProvider,
    at,
    check_hmac,
    check_timestamp,
    decode_hex,
    email_recipient,
    event_id,
    iso_time,
    merged,
    message_id,
    names_person,
    one_header,
    parse_object,
    phone_recipient,
    registration,
    spread,
    text,
    track,
    unix_time,
    user_id,
    user_id_notice,
)

#: The trait with the id of the user's customer.
CUSTOMER_TRAIT = "stripeCustomerId"
#: Keys of an object's metadata that name the user.
USER_KEYS = ("userId", "user_id")
#: Events whose object is a customer's whole profile.
PROFILE_EVENTS = ("customer.created", "customer.updated")
#: Fields of an object that have its customer, or a guest.
PERSON = (
    *("customer", "customer_account", "customer_email", "receipt_email", "email"),
    *("customer_details.email", "customer_details.phone"),
    *("billing_details.email", "billing_details.phone"),
)
#: The id of a test event of the dashboard, and the type of one of an event destination.
TEST_ID, PING = "evt_00000000000000", "v2.core.event_destination.ping"
#: Types of the objects of thin events that belong to no customer.
IMPERSONAL = ("billing.meter", "v2.core.event_destination")
#: Maximum number of items in the header with the signatures; Stripe sends two to four.
MAX_ITEMS = 32


class Stripe(SecretProvider):
    """Deliveries to one webhook endpoint of a Stripe account."""

    setup = (
        "1. Stripe > Developers > Webhooks > Add destination: choose the events, among them\n"
        "   customer.created and customer.updated, the payload style Snapshot, and enter the\n"
        "   URL.\n"
        "2. Copy the signing secret of the endpoint (whsec_...) into the option secret, and\n"
        "   restart engage.\n"
        "3. Set metadata.userId on each customer, or identify your users with the trait\n"
        "   stripeCustomerId. Otherwise an event belongs to the user with the customer's\n"
        "   e-mail address or, if there is none, to a user with the customer's id (cus_...)."
    )

    identifiers = (CUSTOMER_TRAIT,)
    trusted = True

    signing = Signing(
        signature="stripe-signature",
        signature_pattern=r"v1=(?P<signature>[^,]*)",
        body=True,
        timestamp="stripe-signature",
        timestamp_pattern=r"t=(?P<timestamp>[^,]*)",
        # No limit ahead, as in Stripe's own libraries: if this server's clock is slow, payments
        # must not be refused.
        past=300,
    )

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        # Unlike in Standard Webhooks, the whole secret is the key, including whsec_.
        super().__init__(options, context)
        self._tolerance = options.get("tolerance", 300)

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """Check HMAC-SHA256 over ``t.body``; the header has one ``t`` and any number of ``v1``."""
        times, signatures = [], []
        items = one_header(request, "stripe-signature").split(",", MAX_ITEMS)
        if len(items) > MAX_ITEMS:
            raise SignatureMismatch("stripe-signature: too many items")
        for item in items:
            name, _, value = item.partition("=")
            if name.strip() == "t":
                # Two headers joined by a proxy have two; " t" counts too, and never matches.
                times.append(value if name == "t" else "")
            elif name == "v1":
                # There are several while a secret is rolled; a malformed one does not matter.
                with contextlib.suppress(SignatureMismatch):
                    signatures.append(decode_hex(value))
        if len(times) != 1:
            raise SignatureMismatch("stripe-signature: expected one t")
        check_timestamp(times[0], request.now, past=self._tolerance, future=None)
        check_hmac(self.keys, b"%b.%b" % (times[0].encode(), request.body), signatures)

    def translate(self, request: WebhookRequest) -> Translation:
        """Return an identify for a created or updated customer, and a track event for the rest.

        Events that concern no customer, such as payouts, are ignored.
        """
        payload = parse_object(request.body)
        name = text(payload.get("type"))
        if name is None:
            raise PayloadInvalid("type: required")
        if payload.get("id") == TEST_ID or name == PING:
            return Translation(ignored=1, tests=1, types=[name])
        if payload.get("object") == "v2.core.event":
            related = text(at(payload, "related_object.type")) or IMPERSONAL[0]
            if not related.startswith(IMPERSONAL):
                message = "a thin event does not name its customer: choose the snapshot payload"
                raise PayloadInvalid(message, kind=name)
            return Translation(ignored=1, types=[name])
        value = at(payload, "data.object")
        thing: dict[str, Any] = value if isinstance(value, dict) else {}
        user, customer = _user(thing), _customer(thing)
        notice = user_id_notice(() if user == _user(thing, USER_KEYS[:1]) else USER_KEYS)
        recipient = email_recipient(
            thing.get("customer_email"),
            thing.get("receipt_email"),
            thing.get("email"),
            at(thing, "customer_details.email"),
            at(thing, "billing_details.email"),
            at(thing, "customer.email"),
        ) or phone_recipient(
            at(thing, "customer_details.phone"), at(thing, "billing_details.phone")
        )
        if user is None and customer is None and recipient is None:
            if any(names_person({"customer": at(thing, field)}) for field in PERSON):
                raise PayloadInvalid("names a customer, but engage cannot read whom", kind=name)
            return Translation(ignored=1, types=[name])
        created = payload.get("created")
        timestamp = unix_time(created) or iso_time(created)
        identity = message_id(payload.get("id")) or event_id(
            name, str(created), str(user or customer)
        )
        if customer is not None and name in PROFILE_EVENTS and thing.get("object") == "customer":
            document = _identify(thing, user, identity, timestamp, _envelope(payload))
        else:
            document = track(
                name,
                message_id=identity,
                timestamp=timestamp,
                user=user,
                properties=_properties(thing, _envelope(payload)),
            )
        lookups = [] if customer is None else [Recipient(CUSTOMER_TRAIT, customer)]
        event = TranslatedEvent(
            document, recipient, lookups=lookups, fallback=customer, notice=notice
        )
        return Translation(events=[event], types=[name])


def _user(thing: Mapping[str, Any], keys: Sequence[str] = USER_KEYS) -> str | None:
    """Return the user id that was sent to Stripe with an object or its parent."""
    return user_id(*_candidates(thing, keys))


def _candidates(thing: Mapping[str, Any], keys: Sequence[str]) -> Iterator[object]:
    yield from (at(thing, f"metadata.{key}") for key in keys)
    yield thing.get("client_reference_id")
    # An invoice repeats the metadata of its subscription (before and since the API 2025-03-31). The
    # customer has metadata if it is expanded.
    for path in ("subscription_details", "parent.subscription_details", "customer"):
        yield from (at(thing, f"{path}.metadata.{key}") for key in keys)


def _customer(thing: Mapping[str, Any]) -> str | None:
    """Return the id of the customer, or of the account of a customer, whom an object is or belongs
    to."""
    fields = ("id",) if thing.get("object") == "customer" else ("customer", "customer_account")
    values = [thing.get(field) for field in fields]
    return user_id(*(value.get("id") if isinstance(value, dict) else value for value in values))


def _envelope(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a payload that describe the event, not its object."""
    return merged(
        payload,
        {"previous_attributes": at(payload, "data.previous_attributes")},
        # ``pending_webhooks`` differs between deliveries of one event.
        without=("id", "object", "type", "created", "data", "pending_webhooks"),
    )


def _identify(
    customer: Mapping[str, Any],
    user: str | None,
    identity: str,
    timestamp: str | None,
    envelope: Mapping[str, Any],
) -> dict[str, Any]:
    # A trait that is null has been removed: it stays null.
    traits = {
        key: value for key, value in customer.items() if key not in ("id", "object", "metadata")
    }
    traits[CUSTOMER_TRAIT] = customer.get("id")
    document: dict[str, Any] = {
        "type": "identify",
        "messageId": identity,
        "traits": spread(traits, customer.get("metadata"), "metadata", without=USER_KEYS),
    }
    if user is not None:
        document["userId"] = user
    if timestamp is not None:
        document["timestamp"] = timestamp
    if envelope:
        document["properties"] = {"stripeEvent": envelope}
    return document


def _properties(thing: Mapping[str, Any], envelope: Mapping[str, Any]) -> dict[str, Any]:
    properties = merged(thing, without=("metadata",))
    if envelope:
        properties["stripeEvent"] = envelope
    return spread(properties, thing.get("metadata"), "metadata", without=USER_KEYS)


engage_register_webhook = registration("stripe", Stripe)
