# SPDX-License-Identifier: Apache-2.0
"""A delivery for which there is no user goes to the visitor with the address."""

from __future__ import annotations

from typing import Any

from engage.api import Recipient, StorageContext, TranslatedEvent
from engage.deliveries.recipients import Recipients
from engage.testing.factories import event, identify, store_all
from engage.testing.memory_store import MemoryStore

CONTEXT = StorageContext(base_dir=None, identifiers={"acme": ("email",)})  # type: ignore[arg-type]
EMAIL = {"email": "ann@example.com"}


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
    assert await found() == {"anonymousId": "v"}
    # The provider names a user id if no user is found.
    assert await found(fallback="theirs") == {"userId": "theirs"}
    await store_all(store, event("3", user_id="u", anonymous_id="v"))
    assert await found() == {"anonymousId": "v"}
    await store_all(store, identify("4", "u"))
    assert await found() == {"userId": "u"}
