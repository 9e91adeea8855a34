# SPDX-License-Identifier: Apache-2.0
"""Forged, damaged and absurd deliveries to a whole server cause no 5xx and store no event.

Each test has one server with all providers in two workspaces, and sends deliveries over HTTP.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from engage.testing.providers import mutations
from support.http_client import Answer
from support.provider_senders import PUBLIC_URL, SENDERS, Header, Sender, webhooks_table
from support.server_inprocess import Serving, serving

#: Payloads that no provider sends, even with a valid signature.
JUNK = mutations.JUNK | {
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "a number that overflows": b"1e999",
    "not a number": b"[NaN]",
    "half a pair": b'["\\ud800"]',
    "never closed": b"[" * 100_000,
    "more than the limit": b"[" + b"0," * 1_000_000 + b"0]",
}


@contextlib.asynccontextmanager
async def both_workspaces(folder: Path) -> AsyncIterator[Door]:
    """Serve two workspaces, ``acme`` and ``other``, with all providers each."""
    other = '[[workspaces]]\nid = "other"\nname = "Other"\n' + webhooks_table("other")
    public_url = f'public_url = "{PUBLIC_URL}"\n'
    extra = webhooks_table() + other
    async with serving(folder, server=public_url, config_extra=extra) as server:
        yield Door(server)


class Door:
    """The webhook URLs of a server."""

    def __init__(self, server: Serving) -> None:
        self.server = server
        #: The deliveries that were not answered as they should, and the answers.
        self.wrong: list[tuple[object, ...]] = []

    async def knock(
        self, provider: str, headers: Sequence[Header], body: bytes, *, target: str | None = None
    ) -> Answer:
        """Return the answer to a delivery with exactly these headers."""
        target = target or self.target(provider)
        head = [f"POST {target} HTTP/1.1".encode(), b"Host: evil.example"]
        head += [name.encode() + b": " + value for name, value in headers]
        head.append(b"Content-Length: %d" % len(body))
        async with await self.server.connect() as client:
            await client.send(b"\r\n".join([*head, b"", b""]) + body)
            answer = await client.answer()
        assert answer.status < 500, (provider, headers, body[:200], answer)
        return answer

    @staticmethod
    def target(provider: str, workspace: str = "acme") -> str:
        return f"/api/public/webhooks/{provider}?workspaceId={workspace}"

    async def refused(
        self, provider: str, headers: Sequence[Header], body: bytes, **options: Any
    ) -> None:
        """Send a delivery that must be refused."""
        answer = await self.knock(provider, headers, body, **options)
        right = answer.status == 401 and answer.json["code"] == "invalid_signature"
        if not right or "www-authenticate" in answer.headers:
            self.wrong.append((provider, headers, body[:200], answer))

    async def check(self) -> None:
        """Check that all were refused, and that nothing is stored, not even a dead letter."""
        assert self.wrong == []
        assert await self.server.events() == []
        assert await self.server.dead_letters() == []


async def test_a_genuine_delivery_is_stored(tmp_path: Path) -> None:
    """Once; otherwise the tests below would pass on a server that refuses everything."""
    async with both_workspaces(tmp_path) as door:
        for provider, sender in SENDERS.items():
            headers, body = sender.deliver(door.target(provider), time.time())
            answers = [await door.knock(provider, headers, body) for _ in range(2)]
            assert [answer.status for answer in answers] == [200, 200], (provider, answers)
        documents = [event.document() for event in await door.server.events()]
        assert {one["source"] for one in documents} == {f"webhook:{name}" for name in SENDERS}
        assert {(one["workspaceId"], one.get("writeKeyId")) for one in documents} == {
            ("acme", None)
        }
        ids = [(document["source"], document["messageId"]) for document in documents]
        assert len(set(ids)) == len(ids)
        assert await door.server.dead_letters() == []


def without(headers: Sequence[Header], name: str) -> list[Header]:
    return [pair for pair in headers if pair[0].lower() != name.lower()]


async def test_a_forged_proof_is_refused(tmp_path: Path) -> None:
    async with both_workspaces(tmp_path) as door:
        for provider, sender in SENDERS.items():
            if sender.proof is not None:
                await forge(door, provider, sender, sender.proof)
        await door.check()


async def forge(door: Door, provider: str, sender: Sender, name: str) -> None:
    """Send deliveries of a provider with forged proofs.

    :param name: of the header with the proof.
    """
    target, now = door.target(provider), time.time()
    headers, body = sender.deliver(target, now)
    [proof] = [value for header, value in headers if header.lower() == name.lower()]
    rest = without(headers, name)
    forged = [
        *([], [b""], [proof, proof], [b"x", proof], [proof, b"x"]),
        *([proof + b", " + proof + b"x"], [proof[:-1]], [proof[: len(proof) // 2]], [proof[1:]]),
        *([b"%%%"], [b"=" + proof[1:]], ["Grüße".encode()], [b"\xff\xfe" + proof[2:]]),
        *([proof.swapcase()], [b"A" * 20_000], [b"v1," * 1000]),
    ]
    for values in forged:
        await door.refused(provider, rest + [(name, value) for value in values], body)
    if sender.signs:
        headers, _ = sender.deliver(target, now, payload=sender.payload + b" ")
        for changed in (body + b"&x=1", body[:-1], b""):
            await door.refused(provider, headers, changed)
    headers, body = sender.deliver(target, now, options=sender.other)
    await door.refused(provider, headers, body)
    # The answer does not show whether a workspace exists.
    for workspace in ("other", "nobody", ""):
        elsewhere = door.target(provider, workspace)
        headers, body = sender.deliver(elsewhere, now)
        await door.refused(provider, headers, body, target=elsewhere)


async def test_a_signed_delivery_of_junk_stores_no_event(tmp_path: Path) -> None:
    async with both_workspaces(tmp_path) as door:
        sent = set()
        for provider, sender in SENDERS.items():
            target = door.target(provider)
            for kind, payload in JUNK.items():
                headers, body = sender.deliver(target, time.time(), payload=payload)
                sent.add((provider, body))
                answer = await door.knock(provider, headers, body)
                # Mailchimp and Twilio cannot sign what is not a form, nor Segment what is not an
                # array.
                assert answer.status in (200, 400, 401, 413), (provider, kind, answer)
        assert await door.server.events() == []
        for letter in await door.server.dead_letters():
            assert (letter.workspace_id, (letter.origin, letter.item) in sent) == ("acme", True)
            proof = SENDERS[letter.origin].proof or ""
            shown = {value for name, value in letter.headers if name.lower() == proof.lower()}
            assert shown <= {"[redacted]"}


async def test_a_delivery_to_another_provider_is_refused(tmp_path: Path) -> None:
    async with both_workspaces(tmp_path) as door:
        for provider, sender in SENDERS.items():
            for other in SENDERS:
                if other != provider:
                    headers, body = sender.deliver(door.target(other), time.time())
                    await door.refused(other, headers, body)
        await door.check()


async def test_a_delivery_without_a_provider_or_a_workspace_is_refused(tmp_path: Path) -> None:
    async with both_workspaces(tmp_path) as door:
        for provider in ("nobody", "mongo", "..", "sendgrid/", "%00", "SENDGRID"):
            answer = await door.knock(provider, [], b"{}")
            assert answer.status == 404
        for target in (
            "/api/public/webhooks/sendgrid",
            "/api/public/webhooks/sendgrid?workspaceid=acme",
        ):
            answer = await door.knock("sendgrid", [], b"{}", target=target)
            assert (answer.status, answer.json["code"]) == (400, "workspace_required")
        headers, body = SENDERS["sendgrid"].deliver("", time.time())
        twice = door.target("sendgrid") + "&workspaceId=other"
        await door.refused("sendgrid", headers, body, target=twice)
        await door.refused("sendgrid", [*headers, ("df-workspace-id", b"other")], body)
        await door.check()
