# SPDX-License-Identifier: Apache-2.0
"""A delivery for which there is no user goes to the visitor with the address."""

from __future__ import annotations

from typing import Any

from engage.api import Recipient, StorageContext, TranslatedEvent
from engage.subscriptions.recipients import Recipients
from engage.testing.factories import event, identify, store_all
from engage.testing.memory_store import MemoryStore

CONTEXT = StorageContext(base_dir=None, identifiers={"acme": ("email",)})  # type: ignore[arg-type]
EMAIL = {"email": "ann@example.com"}
#: Says that anyone can claim what led to the user.
MARK = {"context": {"engage": {"foundBy": "email:ann@example.com"}}}


def visit(message_id: str, anonymous_id: str, received: int) -> Any:
    return event(
        message_id, type="identify", anonymous_id=anonymous_id, received=received, traits=EMAIL
    )


async def test_a_delivery_goes_to_a_visitor_if_there_is_no_user() -> None:
    store = MemoryStore(None, CONTEXT)
    recipients = Recipients(store, 60)

    async def found(**fields: Any) -> dict[str, Any]:
        sent = TranslatedEvent({}, Recipient("email", "Ann@example.com"), **fields)
        (document,) = await recipients.identify("acme", "sendgrid", [sent])
        return document

    assert await found() == {"anonymousId": "email:ann@example.com"}
    await store_all(store, visit("1", "younger", 2), visit("2", "v", 1))
    assert await found() == {"anonymousId": "v", **MARK}
    # The provider names a user id if no user is found.
    assert await found(fallback="theirs") == {"userId": "theirs"}
    await store_all(store, event("3", user_id="u", anonymous_id="v"))
    assert await found() == {"anonymousId": "v", **MARK}
    await store_all(store, identify("4", "u"))
    assert await found() == {"userId": "u", **MARK}


async def test_a_late_event_goes_to_the_visitor_of_the_earlier_one() -> None:
    """Its own address belongs to nobody, or to a visitor who came later."""
    store = MemoryStore(None, CONTEXT)
    recipients = Recipients(store, 60)
    sent: Any = {"origin": "sendgrid", "event": "Email Sent"}
    await store_all(
        store,
        event("to-v", anonymous_id="v", **sent),
        event("to-address", anonymous_id="email:ann@example.com", **sent),
        event("to-user", user_id="u", anonymous_id="v", **sent),
    )

    async def found(earlier: str, **document: Any) -> dict[str, Any]:
        late = TranslatedEvent(document, Recipient("email", "Ann@example.com"), earlier=earlier)
        (identified,) = await recipients.identify("acme", "sendgrid", [late])
        return {name: value for name, value in identified.items() if name != "properties"}

    assert await found("to-v") == {"anonymousId": "v"}
    assert await found("to-v", anonymousId="own") == {"anonymousId": "own"}
    assert await found("to-user") == {"userId": "u"}
    await store_all(store, visit("1", "w", 1))
    assert await found("to-v") == {"anonymousId": "v"}
    # An id that was made of the address does not stand in the way of who has it now.
    assert await found("to-address") == {"anonymousId": "w", **MARK}
    await store_all(store, identify("2", "ann", traits=EMAIL))
    assert await found("to-address") == {"userId": "ann", **MARK}
