# SPDX-License-Identifier: Apache-2.0
"""Stripe: customers become users, everything else an event."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from engage.api import (
    PayloadInvalid,
    ProviderContext,
    ProviderFactory,
    Register,
    SignatureMismatch,
    Signing,
    TranslatedEvent,
    Translation,
    WebhookRequest,
    hookimpl,
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
    one_header,
    options_schema,
    parse_object,
    spread,
    text,
    track,
    unix_time,
    user_id,
)

#: Keys of a sender's metadata that name the user.
USER_KEYS = ("userId", "user_id")


class Stripe(SecretProvider):
    """Deliveries to one endpoint of a Stripe account."""

    setup = (
        "Stripe > Developers > Webhooks > Add destination: paste the URL and choose the "
        "events.\n"
        "Copy the endpoint's signing secret (whsec_...) into the option secret.\n"
        "Set metadata.userId on customers, or their events belong to the customer's id."
    )

    signing = Signing(
        signature="stripe-signature",
        signature_pattern=r"v1=(?P<signature>[^,]*)",
        body=True,
        timestamp="stripe-signature",
        timestamp_pattern=r"t=(?P<timestamp>[^,]*)",
        # As in Stripe's own libraries: a clock of ours that is late must not refuse payments.
        past=300,
    )

    def __init__(self, options: Mapping[str, Any], context: ProviderContext) -> None:
        # Unlike Standard Webhooks: the whole text is the key, whsec_ included.
        super().__init__(options, context)
        self._tolerance = options.get("tolerance", 300)

    def verify(self, request: WebhookRequest, fetched: bytes | None) -> None:
        """HMAC-SHA256 over ``t.body``; the header holds one ``t`` and any number of ``v1``."""
        times, signatures = [], []
        for item in one_header(request, "stripe-signature").split(","):
            name, _, value = item.partition("=")
            if name.strip() == "t":
                # Two headers that were joined hold a second one; spelt otherwise it is none.
                times.append(value if name == "t" else "")
            elif name == "v1":
                # While a secret is rolled there are several: one that is odd proves nothing.
                with contextlib.suppress(SignatureMismatch):
                    signatures.append(decode_hex(value))
        if len(times) != 1:
            raise SignatureMismatch("stripe-signature: expected one t")
        check_timestamp(times[0], request.now, past=self._tolerance, future=None)
        check_hmac(self.keys, b"%b.%b" % (times[0].encode(), request.body), signatures)

    def translate(self, request: WebhookRequest) -> Translation:
        """``customer.created`` and ``customer.updated`` identify; others are track events.

        An event that concerns no customer (a payout) is of no interest.
        """
        payload = parse_object(request.body)
        name = text(payload.get("type"))
        if name is None:
            raise PayloadInvalid("type: required")
        data = payload.get("data")
        found = data.get("object") if isinstance(data, dict) else None
        thing: dict[str, Any] = found if isinstance(found, dict) else {}
        metadata = thing.get("metadata")
        is_customer = thing.get("object") == "customer"
        customer = thing.get("id") if is_customer else thing.get("customer")
        user = user_id(
            *(metadata.get(key) for key in USER_KEYS if isinstance(metadata, dict)),
            thing.get("client_reference_id"),
            customer.get("id") if isinstance(customer, dict) else customer,
        )
        recipient = email_recipient(
            thing.get("customer_email"),
            thing.get("receipt_email"),
            thing.get("email"),
            at(thing, "customer_details.email"),
            at(thing, "billing_details.email"),
        )
        if user is None and recipient is None:
            return Translation(ignored=1)
        created = payload.get("created")
        timestamp = unix_time(created) or iso_time(created)
        identity = message_id(payload.get("id")) or event_id(name, str(created), str(user))
        # What Stripe says about the event rather than about the thing.
        envelope = merged(
            payload,
            {"previous_attributes": data.get("previous_attributes")}
            if isinstance(data, dict)
            else None,
            # ``pending_webhooks`` is about the deliveries: it changes from one to the next.
            without=("id", "object", "type", "created", "data", "pending_webhooks"),
        )
        if user is not None and is_customer and name in ("customer.created", "customer.updated"):
            # A trait that is null now was taken away: it is kept as null.
            traits = {
                key: value
                for key, value in thing.items()
                if key not in ("id", "object", "metadata")
            }
            traits["stripeCustomerId"] = thing.get("id")
            document: dict[str, Any] = {
                "type": "identify",
                "messageId": identity,
                "userId": user,
                "traits": spread(traits, metadata, "metadata", without=USER_KEYS),
            }
            if timestamp is not None:
                document["timestamp"] = timestamp
            if envelope:
                document["properties"] = {"stripeEvent": envelope}
        else:
            properties = merged(thing, without=("metadata",))
            if envelope:
                properties["stripeEvent"] = envelope
            document = track(
                name,
                message_id=identity,
                timestamp=timestamp,
                user=user,
                properties=spread(properties, metadata, "metadata", without=USER_KEYS),
            )
        return Translation(events=[TranslatedEvent(document, recipient)])


@hookimpl
def engage_register_webhook(register: Register[ProviderFactory]) -> None:
    """Bring ``stripe``."""
    register("stripe", Stripe, options_schema("engage_schemas", "plugins/webhooks/stripe.json"))
