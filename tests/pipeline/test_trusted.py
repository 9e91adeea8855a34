# SPDX-License-Identifier: Apache-2.0
"""Which events vouch for the identifiers in them, and what is shown of the addresses."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engage.api import Kind, StorageContext, Subject
from engage.config import WriteKey
from engage.keys.auth import Principal
from engage.keys.limits import Rules
from engage.subscriptions.links import Person
from engage.testing.factories import suppression
from engage_plugins.segment import Segment
from engage_plugins.stripe import Stripe
from support.each import each
from support.memory_store import MemoryStore
from support.pipeline import ACME, Core, deliver, make_core, send_batch, send_event

SECRET = "5e" * 16
SERVER = WriteKey(id="backend", kind="server", sha256=hashlib.sha256(SECRET.encode()).hexdigest())
WORKSPACE = dataclasses.replace(
    ACME,
    write_keys=(*ACME.write_keys, SERVER),
    protected_traits=("plan",),
    webhooks={"stripe": {}, "segment": {}},
)
EMAIL = {"email": "ann@a.example"}
CONTEXT = StorageContext(base_dir=Path(), identifiers={"acme": ("email", "phone")})


def principal(key: WriteKey) -> Principal:
    return Principal(WORKSPACE, key)


async def certain(core: Core, user: str = "u") -> dict[str, str]:
    found = await core.store.certain("acme", user)
    return {trait: value for trait, value in found.items() if value is not None}


@each(
    "operation, sent, mark",
    [
        ("identify", {"userId": "u", "traits": {**EMAIL, "plan": 1}}, ["email"]),
        ("identify", {"userId": "u", "context": {"traits": EMAIL}}, ["email"]),
        ("identify", {"userId": "u", "anonymousId": "v", "traits": {"phone": "1"}}, ["phone"]),
        ("identify", {"userId": "u", "traits": {"plan": 1}}, None),
        ("identify", {"anonymousId": "v", "traits": EMAIL}, ["email"]),
        ("identify", {"anonymousId": "v"}, []),
        ("group", {"anonymousId": "v", "groupId": "g", "traits": EMAIL}, []),
        ("group", {"userId": "u", "groupId": "g", "traits": EMAIL}, None),
        ("track", {"userId": "u", "event": "E", "properties": EMAIL}, None),
        ("alias", {"userId": "u", "previousId": "v", "traits": EMAIL}, None),
    ],
)
async def test_a_server_key_vouches(
    operation: str, sent: Mapping[str, Any], mark: list[str] | None
) -> None:
    """A public key does not, whatever it sends in the place of the mark."""
    forged = {**sent, "context": {**sent.get("context", {}), "engage": {"trusted": ["email"]}}}
    for key in (SERVER, ACME.write_keys[0]):
        core = make_core(MemoryStore(None, CONTEXT), workspace=WORKSPACE)
        await send_event(core, forged, operation, principal=principal(key))
        await send_batch(
            core, [{**forged, "type": operation, "messageId": "b"}], principal=principal(key)
        )
        for event in core.store.events.values():
            found = event.document().get("context", {}).get("engage", {}).get("trusted")
            assert found == (mark if key is SERVER else None)
        sure = {*(mark or ())} if operation == "identify" and "userId" in sent else set()
        assert {*await certain(core)} == (sure if key is SERVER else set())


@each(
    "provider, table, vouches",
    [
        (Stripe, {}, True),
        (Stripe, {"trusted": False}, False),
        (Segment, {}, False),
        (Segment, {"trusted": True}, True),
    ],
)
async def test_a_provider_that_states_its_own_customers_vouches(
    provider: Any, table: Mapping[str, Any], vouches: bool
) -> None:
    """Its events set protected traits, too; those of another provider do not."""
    core, name = (
        make_core(MemoryStore(None, CONTEXT), workspace=WORKSPACE),
        provider.__name__.lower(),
    )
    workspace = dataclasses.replace(WORKSPACE, webhooks={name: table})
    rules = Rules.of_provider(workspace, name, provider)
    event = {"type": "identify", "messageId": "1", "userId": "u", "traits": {**EMAIL, "plan": 1}}
    found = {"context": {"engage": {"foundBy": "email:ann@a.example"}}}
    # Anyone may have claimed to be the user whom engage found.
    other = {**event, "messageId": "2", "userId": "found", **found}
    await deliver(core, [event, other], name, rules=rules)
    assert await certain(core) == (EMAIL if vouches else {})
    assert await certain(core, "found") == {}
    user = await core.store.profile("acme", "u")
    assert user is not None
    assert user.traits == ({**EMAIL, "plan": 1} if vouches else EMAIL)


async def test_a_transform_may_remove_what_is_vouched_for() -> None:
    """The value from before stays certain."""

    def remove(document: dict[str, Any]) -> dict[str, Any]:
        if document["traits"].get("gone"):
            del document["traits"]["email"]
        return document

    core = make_core(
        MemoryStore(None, CONTEXT), workspace=WORKSPACE, transforms=[("remove", remove)]
    )
    for more in ({}, {"gone": True}):
        item = {"userId": "u", "traits": {**EMAIL, **more}}
        await send_event(core, item, "identify", principal=principal(SERVER))
    assert await certain(core) == EMAIL


async def test_a_link_by_an_id_shows_what_is_suppressed_of_certain_addresses() -> None:
    core = make_core(MemoryStore(None, CONTEXT), workspace=WORKSPACE)
    await core.store.suppress([suppression("ann@a.example", reason="complaint")])

    async def shown(kind: Kind, name: str, **fields: Any) -> tuple[list[str], list[str]]:
        person = Person(
            workspace=WORKSPACE,
            subject=Subject(kind, name),
            secret="",
            expired=False,
            **{"identifier": name, "identifier_key": "id", **fields},
        )
        found = await core.pipeline.preferences(person)
        return [one.reason for one in found.suppressions], [*found.left_out]

    async def identify(key: WriteKey, **item: Any) -> None:
        await send_event(core, item, "identify", principal=principal(key))

    public = ACME.write_keys[0]
    assert await shown(Kind.USER, "u") == ([], [])
    await identify(public, userId="u", traits=EMAIL)
    assert await shown(Kind.USER, "u") == ([], ["email"])
    await identify(SERVER, userId="u", traits=EMAIL)
    await identify(public, userId="eve", traits=EMAIL)
    assert await shown(Kind.USER, "u") == (["complaint"], [])
    assert await shown(Kind.USER, "eve") == ([], ["email"])
    await identify(SERVER, anonymousId="u", traits=EMAIL)
    visitor = {"identifier_key": "anonymousId"}
    assert await shown(Kind.VISITOR, "u", **visitor) == ([], ["email"])
    # Who signs an address sends the link to it.
    signed = {"identifier_key": "email", "identifier": "ann@a.example"}
    for kind, name in ((Kind.USER, "eve"), (Kind.VISITOR, "u")):
        assert await shown(kind, name, **signed) == (["complaint"], [])
