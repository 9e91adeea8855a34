# SPDX-License-Identifier: Apache-2.0
"""A late bounce gets its user and metadata from the event that says that the message was sent."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any, Never

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from engage.api import StorageUnavailable, WebhookRequest
from engage_plugins.sendgrid import SIGNATURE, TIMESTAMP
from support.provider_http import PUBLIC_URL, deliver
from support.providers import request
from support.server_inprocess import Serving, serving

KEY = ec.generate_private_key(ec.SECP256R1())
PUBLIC = base64.b64encode(
    KEY.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
).decode()
WORKSPACE = f'[workspaces.webhooks.sendgrid]\nverification_key = "{PUBLIC}"\n'
SENT = {
    "event": "processed",
    "email": "Ann@example.com",
    "timestamp": 1_700_000_000,
    "smtp-id": "<1@mail.test>",
    "sg_message_id": "1.filter.0",
    "sg_event_id": "e-sent",
    "category": ["welcome"],
    "userId": "ann",
    "templateId": "t-1",
}
BOUNCE = {
    "event": "bounce",
    "email": "ann@example.com",
    "timestamp": 1_700_090_000,
    "smtp-id": "<1@mail.test>",
    "sg_message_id": "",
    "sg_event_id": "e-bounce",
    "reason": "550 no such user",
}


def signed(*items: Any) -> WebhookRequest:
    """Return a delivery of SendGrid events."""
    body, now = json.dumps(items).encode(), str(int(time.time()))
    signature = KEY.sign(now.encode() + body, ec.ECDSA(hashes.SHA256()))
    headers = {SIGNATURE: base64.b64encode(signature).decode(), TIMESTAMP: now}
    return request(body, headers, url=f"{PUBLIC_URL}/api/public/webhooks/sendgrid")


async def named(server: Serving, event: str) -> list[dict[str, Any]]:
    """Return the stored events of a name."""
    found = [stored.document() for stored in await server.events()]
    return [document for document in found if document.get("event") == event]


async def send(server: Serving, *items: Any) -> None:
    answer = await deliver(server, signed(*items))
    assert answer.status == 200


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kind", ["bounce", "spamreport"])
async def test_a_late_event_gets_the_user_and_what_was_sent_with_the_message(
    tmp_path: Path, kind: str, together: bool
) -> None:
    late = {**BOUNCE, "event": kind}
    async with serving(tmp_path, workspace=WORKSPACE) as server:
        if together:
            await send(server, late, SENT)
        else:
            await send(server, SENT)
            await send(server, late)
        [document] = await named(
            server, {"bounce": "Email Bounced", "spamreport": "Email Marked as Spam"}[kind]
        )
        assert document["userId"] == "ann"
        properties = document["properties"]
        assert (properties["templateId"], properties["category"]) == ("t-1", ["welcome"])
        # What it has itself stays.
        assert properties["sg_event_id"] == "e-bounce"
        assert (properties["reason"], properties["email"]) == (late["reason"], late["email"])
        assert len(await named(server, "Email Sent")) == 1
        await send(server, SENT)
        await send(server, late)
        assert len(await server.events()) == 2
        assert await server.dead_letters() == []


async def test_a_late_event_without_an_earlier_one_goes_to_the_address(tmp_path: Path) -> None:
    """Later deliveries of the same event are duplicates, although more is known then."""
    async with serving(tmp_path, workspace=WORKSPACE) as server:
        await send(server, BOUNCE)
        await send(server, SENT)
        await send(server, BOUNCE)
        [document] = await named(server, "Email Bounced")
        assert document["anonymousId"] == "email:ann@example.com"
        assert await server.dead_letters() == []
        # Each recipient of a message has an own one.
        await send(server, {**BOUNCE, "email": "bob@example.com", "sg_event_id": "e-2"})
        documents = await named(server, "Email Bounced")
        assert documents[1]["anonymousId"] == "email:bob@example.com"


async def test_an_earlier_event_without_a_user_gives_its_properties(tmp_path: Path) -> None:
    async with serving(tmp_path, workspace=WORKSPACE) as server:
        await send(server, {key: value for key, value in SENT.items() if key != "userId"})
        await server.send("/v1/identify", {"userId": "u1", "traits": {"email": "ann@example.com"}})
        await send(server, BOUNCE)
        [document] = await named(server, "Email Bounced")
        assert (document["userId"], document["properties"]["templateId"]) == ("u1", "t-1")


async def test_only_events_without_a_user_are_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that cannot answer is a 503, and the delivery is complete when it is repeated."""
    async with serving(tmp_path, workspace=WORKSPACE) as server:
        await send(server, SENT)

        async def broken(*_: object) -> Never:
            raise StorageUnavailable("no")

        with monkeypatch.context() as patched:
            patched.setattr(server.app.store, "find", broken)
            await send(server, {**BOUNCE, "userId": "ben", "sg_event_id": "e-ben"})
            answer = await deliver(server, signed(BOUNCE))
            assert (answer.status, answer.json["code"]) == (503, "storage_unavailable")
        await send(server, BOUNCE)
        documents = await named(server, "Email Bounced")
        assert [document["userId"] for document in documents] == ["ben", "ann"]
        assert "templateId" not in documents[0]["properties"]
