# SPDX-License-Identifier: Apache-2.0
"""Recorded deliveries of every provider, without a server.

A recorded translation has the event as it is stored in an empty workspace. The stored event has at
least the recorded properties and context, and exactly the other recorded fields.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from engage.api import (
    PayloadInvalid,
    Provider,
    SignatureMismatch,
    TranslatedEvent,
    WebhookRequest,
    identifier_value,
)
from engage.errors import Limit
from engage.pipeline.normalise import Arrival, normalise
from engage.pipeline.validate import Schemas
from support.providers import (
    MAPPINGS,
    VECTORS,
    delivery_of,
    make,
    recipient_of,
    request_of,
    signature_vectors,
)

#: Milliseconds; later than every recorded event.
RECEIVED_AT = 1_800_000_000_000


def test_all_recordings_are_there() -> None:
    assert len(VECTORS) == 146
    assert len(MAPPINGS) == 52


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["id"])
def test_a_recorded_signature_verifies_as_recorded(vector: dict[str, Any]) -> None:
    provider = make(vector["provider"], vector["config"], url=vector["url"])
    delivery = request_of(vector)
    if vector["expected"] == "invalid":
        answered = provider.probe(delivery)
        if vector.get("expected_status") == 200:
            assert answered is not None
            return
        assert answered is None
        with pytest.raises(SignatureMismatch):
            verify(provider, delivery)
        return
    assert provider.probe(delivery) is None
    verify(provider, delivery)
    if vector["expected"] == "unreadable":
        with pytest.raises(PayloadInvalid):
            provider.translate(delivery)
    else:  # some recordings are only about the signature
        with contextlib.suppress(PayloadInvalid):
            provider.translate(delivery)


def verify(provider: Provider, delivery: WebhookRequest) -> None:
    # Recordings that need a certificate have it in their options.
    assert provider.needs(delivery) is None
    try:
        provider.verify(delivery, None)
    except SignatureMismatch:
        raise
    except Exception as error:  # for the core, any exception in verify is a mismatch
        raise SignatureMismatch(repr(error)) from error


@pytest.mark.parametrize(
    "mapping", MAPPINGS, ids=lambda mapping: f"{mapping['provider']}: {mapping['description']}"
)
def test_a_recorded_payload_becomes_the_recorded_events(mapping: dict[str, Any]) -> None:
    provider = make(mapping["provider"], signature_vectors(mapping["provider"])[0]["config"])
    translation = provider.translate(delivery_of(mapping["provider"], mapping["input"]))
    assert not translation.rejected
    got = [stored(event) for event in translation.events]
    assert len(got) == len(mapping["expected_events"])
    for document, expected in zip(got, mapping["expected_events"], strict=True):
        for field, value in expected.items():
            if field in ("properties", "context"):
                assert {name: document[field].get(name) for name in value} == value
            else:
                assert document[field] == value
        for field in ("userId", "anonymousId"):
            assert document.get(field) == expected.get(field)
        if "timestamp" not in expected:
            assert document["timestamp"] == document["receivedAt"]
    ids = [document["messageId"] for document in got]
    assert len(set(ids)) == len(ids)
    again = provider.translate(delivery_of(mapping["provider"], mapping["input"]))
    assert [event.document["messageId"] for event in again.events] == ids


def stored(event: TranslatedEvent) -> dict[str, Any]:
    """Return the document as it is stored in a workspace without users."""
    document = dict(event.document)
    if "userId" not in document and "anonymousId" not in document:
        trait, value = recipient_of(event)
        document["anonymousId"] = f"{trait}:{identifier_value(trait, value)}"
    assert Schemas.load().problems(document["type"], document) == []
    arrival = Arrival(
        workspace_id="acme",
        write_key_id=None,
        received_at=RECEIVED_AT,
        event_limit=Limit(2**20, "limits.webhook_event_bytes"),
        correct_clock=False,
    )
    return normalise(document, document["type"], arrival).document()
