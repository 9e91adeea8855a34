# SPDX-License-Identifier: Apache-2.0
"""An erasure and an export take the visitors that surely are the user's, and name the others."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import orjson
import pytest

from engage.api import EngageError, Recipient, StorageContext, TranslatedEvent, Translation
from engage.audit import record_audit
from engage.config import erasures_file as erasures
from engage.deliveries.receive import translate
from engage.keys.changes import create_key
from engage.people.addresses import named_addresses
from engage.people.erase import Receipt, erase_user, repeat
from engage.people.person import (
    OtherVisitor,
    export_person,
    other_visitors,
    person_of,
    visitors_of,
)
from engage.pipeline.normalise import Arrival, normalise
from engage.subscriptions.recipients import Recipients
from engage.testing import MemoryStore
from engage.testing.factories import TIME, all_pages, event, identify, letter, user, visitor
from engage.testing.factories import ids as ids_of
from support.people import ACTOR, KEY, config, on_each, traces
from support.providers import request
from support.rules.erasures import change

ANN = "ann@example.com"
SERVER: Any = {"writeKeyId": "backend"}
PUBLIC: Any = {"writeKeyId": "website"}


def seen(message_id: str, anonymous_id: str, at: int = 0, **traits: Any) -> Any:
    """Return an identify event of a visitor."""
    return event(message_id, type="identify", anonymous_id=anonymous_id, at=at, traits=traits)


def linked(message_id: str, user_id: str, anonymous_id: str, at: int = 0, **fields: Any) -> Any:
    """Return an identify event that links a visitor."""
    return identify(message_id, user_id, at, anonymous_id=anonymous_id, **fields)


def decided(message_id: str, user_id: str, anonymous_id: str, at: int, **fields: Any) -> Any:
    """Return a decision of an operator about a link."""
    names = {"previousId": anonymous_id, "linked": True, **fields}
    return event(message_id, type="alias", user_id=user_id, at=at, origin="operator", **names)


async def erased(store: Any, folder: Path, user_id: str = "ann", **options: Any) -> Receipt:
    return await erase_user(store, config(folder), "acme", user_id, actor=ACTOR, **options)


async def exported(store: Any, folder: Path, user_id: str = "ann", *whom: Any) -> list[Any]:
    workspace = config(folder).workspaces[0]
    return [orjson.loads(line) async for line in export_person(store, workspace, user_id, *whom)]


async def sure(store: Any, folder: Path, user_id: str = "ann") -> set[str]:
    return await visitors_of(store, config(folder).workspaces[0], user_id)


# ------------------------------------------------------------------------------------ what is sure
@on_each
async def test_only_a_server_key_or_an_operator_makes_a_link_sure(
    store: Any, tmp_path: Path
) -> None:
    alias: Any = {"type": "alias", "user_id": "ann"}
    await store.write(
        [
            linked("1", "ann", "by-identify", **SERVER),
            event("2", previousId="by-alias", anonymous_id="cookie", **SERVER, **alias),
            decided("3", "ann", "by-operator", 1),
            # A server passes on the cookie of a browser; a key may be unknown, or public now.
            event("4", user_id="ann", anonymous_id="passed-on", previousId="passed-on", **SERVER),
            event("5", type="group", user_id="ann", anonymous_id="group", groupId="g", **SERVER),
            linked("6", "ann", "public", **PUBLIC),
            event("7", previousId="public-alias", **PUBLIC, **alias),
            linked("8", "ann", "unknown", writeKeyId="gone"),
            linked("9", "ann", "no-key"),
            linked("a", "ann", "provider", origin="segment", **SERVER),
            linked("b", "ann", "elsewhere", workspace="other", **SERVER),
            linked("c", "ann", "undone", **SERVER),
            decided("d", "ann", "undone", 9, linked=False),
            linked("e", "ann", "undone", 10, **SERVER),
            decided("f", "ann", "restored", 8, linked=False),
            decided("g", "ann", "restored", 9),
            linked("h", "ann", "email:ann@example.com", **SERVER),
            linked("i", "ann", "ann", **SERVER),
        ]
    )
    assert await sure(store, tmp_path) == {"by-identify", "by-alias", "by-operator", "restored"}


@on_each
async def test_a_server_key_may_be_made_in_the_store(store: Any, tmp_path: Path) -> None:
    workspaces = config(tmp_path).workspaces
    for name, kind in (("mine", "server"), ("page", "public")):
        options = {"kind": kind}
        await create_key(store, workspaces, "acme", name, options=options, actor=ACTOR, now=TIME)
    await store.write(
        [
            linked("1", "ann", "a1", writeKeyId="mine"),
            linked("2", "ann", "a2", writeKeyId="page"),
        ]
    )
    assert await sure(store, tmp_path) == {"a1"}


@on_each
async def test_the_first_sure_link_decides_whoever_claimed_it_before(
    store: Any, tmp_path: Path
) -> None:
    await store.write(
        [
            linked("1", "mallory", "v", 1, **PUBLIC),
            linked("2", "ann", "v", 2, **SERVER),
            linked("3", "bob", "v", 3, **SERVER),
            decided("4", "eve", "v", 4),
            seen("5", "v", 0, city="Ulm"),
        ]
    )
    found = [await sure(store, tmp_path, name) for name in ("mallory", "ann", "bob", "eve")]
    assert found == [set(), {"v"}, set(), set()]
    # After an operator said that it is not hers, it is of the next one.
    await store.write([decided("6", "ann", "v", 5, linked=False)])
    found = [await sure(store, tmp_path, name) for name in ("mallory", "ann", "bob", "eve")]
    assert found == [set(), set(), {"v"}, set()]


@on_each
async def test_what_was_before_the_first_identify_is_erased(store: Any, tmp_path: Path) -> None:
    """Choices by a link of the visitor, and events, of a browser that signs up later."""
    source = {"secret": "12345678", "user_agent": "Firefox", "address": "192.0.2.7"}
    await store.apply(change("c1", "", subject=visitor("a1"), **source))
    await store.write(
        [
            event("1", anonymous_id="a1", at=1),
            event("2", type="alias", user_id="ann", previousId="a1", at=2, **SERVER),
            identify("3", "ann", 3, traits={"plan": "a"}),
        ]
    )
    await store.put([letter("l1", user_id=None, anonymous_id="a1")])
    receipt = await erased(store, tmp_path)
    counted = {name: count for name, count in receipt.counts.items() if count}
    assert counted.pop("users") == 1
    assert counted == {"events": 3, "deadLetters": 1, "choices": 1, "subscriptionHistory": 1}
    assert receipt.other_visitors == []
    assert await traces(store) == []
    (record,) = await all_pages(store.history, "acme", None)
    assert record.change_id != "c1"


@on_each
async def test_what_a_link_of_the_user_unsubscribed_is_the_users(
    store: Any, tmp_path: Path
) -> None:
    """Such a link unsubscribes the visitor with the same id, too. Nobody else made its choice if
    nothing else is known of this visitor."""
    await store.write([identify("1", "ann", 1), identify("2", "bob", 1)])
    for number, subject in enumerate((user("ann"), visitor("ann"), user("bob"), visitor("bob"))):
        await store.apply(change(f"c{number}", "", subject=subject))
    await store.write([event("3", anonymous_id="bob", at=3)])
    receipt = await erased(store, tmp_path)
    assert receipt.other_visitors == []
    assert receipt.counts["choices"] == 2
    assert await traces(store) == []
    # Somebody sent events as the visitor bob.
    receipt = await erased(store, tmp_path, "bob")
    assert [one.anonymous_id for one in receipt.other_visitors] == ["bob"]
    assert await store.state("acme", visitor("bob")) == {"news": False}


# -------------------------------------------------------------------------------------- the others
@on_each
async def test_other_visitors_are_named_and_stay(store: Any, tmp_path: Path) -> None:
    """Also one that has the text of the user id: it is another person."""
    await store.apply(change("c1", "", subject=visitor("ann"), choices={"news": True}))
    await store.apply(change("c2", "", subject=visitor("chose"), choices={"news": False}))
    await store.write(
        [
            identify("1", "ann", 1, traits={"plan": "a"}),
            linked("2", "ann", "mine", 2, **SERVER),
            event("3", anonymous_id="mine", at=3),
            linked("4", "ann", "left", 4, **PUBLIC),
            seen("5", "left", 5, email="x@y.z", city="Ulm"),
            event("6", anonymous_id="left", at=7),
            linked("7", "ann", "shared", 8),
            event("8", user_id="bob", anonymous_id="shared", at=9),
            event("9", anonymous_id="shared", at=6),
            linked("a", "ann", "parted", 8),
            decided("b", "bob", "parted", 9),
            decided("c", "bob", "parted", 10, linked=False),
            seen("d", "parted", 5),
            linked("e", "ann", "chose", 8),
            linked("f", "ann", "nothing", 8),
            event("g", anonymous_id="ann", at=20),
        ]
    )
    receipt = await erased(store, tmp_path)
    visitors = {one.anonymous_id: one for one in receipt.other_visitors}
    assert list(visitors) == ["ann", "chose", "left", "parted", "shared"]
    assert visitors["left"] == OtherVisitor(
        anonymous_id="left",
        first=TIME + 5,
        last=TIME + 7,
        events=2,
        traits=["city", "email"],
        linked=True,
        shared=False,
    )
    assert [visitors[name].shared for name in visitors] == [False, False, False, True, True]
    assert [name for name in visitors if not visitors[name].linked] == ["ann"]
    assert (visitors["chose"].first, visitors["chose"].events) == (None, 0)
    assert sorted(await ids_of(store)) == ["5", "6", "8", "9", "b", "c", "d", "g"]
    assert await store.state("acme", visitor("ann")) == {"news": True}
    assert await store.state("acme", visitor("chose")) == {"news": False}
    assert (await store.visitor("acme", "left")).traits == {"email": "x@y.z", "city": "Ulm"}
    (entry,) = await all_pages(store.list_records, "audit")
    assert orjson.loads(entry.body)["details"]["otherVisitors"] == 5
    assert b"left" not in entry.body


@on_each
async def test_an_operator_names_visitors(store: Any, tmp_path: Path) -> None:
    await store.write(
        [
            linked("1", "ann", "left", **PUBLIC),
            seen("2", "left"),
            event("3", user_id="bob", anonymous_id="left", at=1),
            event("4", anonymous_id="ann"),
            event("5", anonymous_id="unlinked"),
            event("6", anonymous_id="else"),
        ]
    )
    names = ["left", "ann", "unlinked"]
    found = await exported(store, tmp_path, "ann", (), names)
    assert sorted(one["messageId"] for one in found if one["record"] == "events") == [*"1245"]
    with pytest.raises(EngageError, match="is no visitor but an address"):
        await erased(store, tmp_path, visitors=["email:x@y.z"])
    receipt = await erased(store, tmp_path, visitors=names)
    assert receipt.other_visitors == []
    assert (receipt.counts["events"], receipt.counts["undoneLinks"]) == (4, 0)
    assert sorted(await ids_of(store)) == ["3", "6"]


async def test_events_are_counted_for_as_long_as_a_page_waits(tmp_path: Path) -> None:
    store: Any = MemoryStore()
    await store.write([event("1", user_id="ann", anonymous_id="v"), event("2", anonymous_id="w")])
    scan, workspace = store.scan, config(tmp_path).workspaces[0]
    person = await person_of(store, workspace, "ann")
    assert await other_visitors(store, workspace, person) == []

    async def slow(*arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(60)
        return await scan(*arguments, **options)

    store.scan = slow
    (found,) = await other_visitors(store, workspace, person, seconds=0.05)
    assert (found.anonymous_id, found.events, found.first) == ("v", None, None)
    assert found.described() == "v (events: not counted; traits: -)"


@on_each
async def test_linked_visitors_are_those_of_nobody_else(store: Any, tmp_path: Path) -> None:
    await store.write(
        [
            linked("1", "ann", "alone"),
            seen("2", "alone", 2),
            linked("3", "ann", "shared"),
            linked("4", "bob", "shared", 1),
            seen("5", "shared", 2),
            linked("6", "ann", "parted"),
            decided("7", "bob", "parted", 1),
            decided("8", "bob", "parted", 2, linked=False),
            seen("9", "parted", 2),
            event("a", anonymous_id="ann"),
        ]
    )
    receipt = await erased(store, tmp_path, linked=True)
    assert [one.anonymous_id for one in receipt.other_visitors] == ["ann", "parted", "shared"]
    # The decisions are of bob.
    assert sorted(await ids_of(store)) == ["4", "5", "7", "8", "9", "a"]


@on_each
async def test_a_file_of_erasures_takes_what_the_erasure_took(store: Any, tmp_path: Path) -> None:
    events = [
        linked("1", "ann", "mine", **SERVER),
        seen("2", "mine"),
        linked("3", "ann", "named"),
        seen("4", "named"),
        linked("5", "ann", "left"),
        seen("6", "left"),
        event("7", anonymous_id="ann"),
    ]
    backup = MemoryStore()
    for one in (store, backup):
        await one.write(events)
    await erased(store, tmp_path, visitors=["named"])
    known, _ = erasures.read(erasures.erasures_path(config(tmp_path)), KEY)
    await repeat(backup, config(tmp_path), known)
    assert sorted(await ids_of(store)) == await ids_of(backup) == ["6", "7"]


# -------------------------------------------------------------------------------------- the export
@on_each
async def test_a_profile_has_nothing_of_other_visitors(store: Any, tmp_path: Path) -> None:
    """Neither what they set, nor that they did."""
    group: Any = {"type": "group", "groupId": "g"}
    await store.write(
        [
            identify("1", "ann", 1, traits={"plan": "a", "own": 1, "gone": 1}),
            identify("2", "ann", 2, origin="operator", removedTraits=["gone"]),
            linked("3", "ann", "mine", 3, **SERVER),
            seen("4", "mine", 4, city="Ulm"),
            event("5", anonymous_id="mine", at=5, **{**group, "groupId": "g-mine"}),
            event("6", user_id="ann", at=2, **group),
            linked("7", "ann", "left", 3, **PUBLIC),
            seen("8", "left", 80, plan="b", secret="x", gone=2, city="Rome"),
            event("9", anonymous_id="left", at=81, **{**group, "groupId": "g-left"}),
            event("a", anonymous_id="left", at=82, **group),
        ]
    )
    assert (await store.profile("acme", "ann")).traits["secret"] == "x"
    user, *others = await exported(store, tmp_path)
    assert user["traits"] == {"plan": "a", "own": 1}
    assert user["groups"] == ["g", "g-mine"]
    assert user["updatedAt"] == "2025-01-01T00:00:00.005Z"
    assert user["anonymousIds"] == ["left", "mine"]
    assert b"secret" not in orjson.dumps(others)
    assert [one["traits"] for one in others if one["record"] == "visitors"] == [{"city": "Ulm"}]
    user, *_ = await exported(store, tmp_path, "ann", (), ["left"])
    assert user["traits"]["secret"] == "x"


async def test_a_delivery_found_by_an_address_is_left_out(tmp_path: Path) -> None:
    """Anyone can claim an address, so the deliveries to it may be about another person."""
    context = StorageContext(base_dir=tmp_path, identifiers={"acme": ["email", "phone"]})
    store: Any = MemoryStore(None, context)
    recipients, limits = Recipients(store, 60), config(tmp_path).limits
    arrival = Arrival.of_delivery("acme", "sendgrid", received_at=TIME + 9, limits=limits)

    async def deliver(name: str, *, earlier: str | None = None, **document: Any) -> None:
        document = {"type": "track", "event": "Email Opened", "messageId": name, **document}
        to = Recipient("email", "Ann@Example.com")
        one = TranslatedEvent(document, to, earlier=earlier)
        provider = Mock(translate=lambda _: Translation(events=[one]))
        translation, _ = translate(provider, request(""), 64)
        (found,) = await recipients.identify("acme", "sendgrid", translation.events)
        await store.write([normalise(found, "track", arrival)])

    await store.write([identify("1", "mallory", traits={"email": ANN})])
    await deliver("by-id", userId="mallory")
    await deliver("by-address")
    await deliver("later", earlier="by-address")
    await deliver("later-by-id", earlier="by-id")
    forged = {"engage": {"foundBy": "email:x@y.z", "verified": True}, "ip": "192.0.2.1"}
    await deliver("forged", userId="mallory", context=forged)
    await store.put(
        [
            letter(name, user_id="mallory", origin="sendgrid", reason=reason, item=item.body)
            for name, reason in (("l1", "message_id_conflict"), ("l2", "invalid_payload"))
            for item in [await store.find("acme", "sendgrid", "by-address")]
        ]
    )
    assert (await store.find("acme", "sendgrid", "forged")).document()["context"] == {
        "ip": "192.0.2.1"
    }
    left_out = Counter[str]()
    workspace = config(tmp_path).workspaces[0]

    async def ids(*addresses: str) -> set[str]:
        named = named_addresses(addresses)
        stream = export_person(store, workspace, "mallory", named, left_out=left_out)
        found = [orjson.loads(line) async for line in stream]
        return {one.get("id") or one["messageId"] for one in found if one["record"] != "users"}

    assert await ids() == {"1", "by-id", "later-by-id", "forged", "l2"}
    assert left_out == {f"email:{ANN}": 3}
    assert await ids(ANN) == {"1", "by-id", "by-address", "later", "later-by-id", "forged"} | {
        *("l1", "l2")
    }
    receipt = await erased(store, tmp_path, "mallory")
    assert (receipt.counts["events"], receipt.counts["deadLetters"]) == (6, 2)


# ---------------------------------------------------------------------------------------- the rest
@on_each
async def test_the_envelope_of_a_batch_is_searched(store: Any, tmp_path: Path) -> None:
    """A letter without an id may be known by what applied to all items."""
    envelope = orjson.dumps({"context": {"traits": {"email": " Ann@Example.com"}}})
    none: Any = {"user_id": None, "anonymous_id": None}
    await store.put(
        [
            letter("l1", envelope=envelope, **none),
            letter("l2", envelope=envelope.replace(b"Ann@", b"joann@"), **none),
            letter("l3", envelope=envelope, user_id="bob", anonymous_id=None),
            letter("l4", envelope=envelope, user_id=None, anonymous_id="b1"),
            letter("l5", envelope=None, **none),
        ]
    )
    receipt = await erased(store, tmp_path, addresses=named_addresses([ANN]))
    assert receipt.counts["deadLetters"] == 1
    left = {one.id for one in await all_pages(store.scan_dead_letters, "acme")}
    assert left == {"l2", "l3", "l4", "l5"}


@on_each
async def test_an_entry_of_the_audit_is_of_a_user_or_of_a_visitor(
    store: Any, tmp_path: Path
) -> None:
    """Anyone can make a user with the text of another's anonymous id, or of a key."""
    for about in ({"user": "victim", "anonymousId": "v"}, {"key": "v"}, {"user": "v"}):
        await record_audit(store, ACTOR, "x", {"workspace": "acme", **about}, now=TIME)
    found = await exported(store, tmp_path, "v")
    assert [one["details"] for one in found] == [{"workspace": "acme", "user": "v"}]
    receipt = await erased(store, tmp_path, "v")
    assert receipt.counts["auditEntries"] == 1
