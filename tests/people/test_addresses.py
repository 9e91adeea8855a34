# SPDX-License-Identifier: Apache-2.0
"""An erasure and an export reach what is known under an address only if an operator names it."""

from __future__ import annotations

import dataclasses
import json
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import orjson
import pytest

from engage.api import EngageError, Kind, Subject
from engage.config import erasures_file as erasures
from engage.people.addresses import addresses_in, named_addresses
from engage.people.erase import Receipt, erase_user, repeat
from engage.people.person import export_person, other_addresses, person_of
from engage.store.keys import hash_of
from engage.store.suppressions import hashed_address
from engage.testing import MemoryStore
from engage.testing.factories import all_pages, event, identify, letter, suppression
from support.people import ACTOR, KEY, config, lines, on_each
from support.rules.erasures import change

ANN = "ann@example.com"


async def erased(store: Any, folder: Path, user_id: str, *addresses: str) -> Receipt:
    named = named_addresses(addresses)
    return await erase_user(store, config(folder), "acme", user_id, actor=ACTOR, addresses=named)


async def exported(store: Any, folder: Path, user_id: str, *addresses: str) -> list[Any]:
    workspace = config(folder).workspaces[0]
    named = named_addresses(addresses)
    return [orjson.loads(x) async for x in export_person(store, workspace, user_id, named)]


def delivery(number: int, item: bytes, **fields: Any) -> Any:
    return letter(f"l{number}", user_id=None, origin="sendgrid", item=item, **fields)


async def letters(store: Any) -> set[str]:
    return {one.id for one in await all_pages(store.scan_dead_letters, "acme")}


# ---------------------------------------------------------------------------------------- addresses
@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("Ann@Example.com ", "email:ann@example.com"),
        ("Ann <ann@example.com>", "email:ann@example.com"),
        ("mailto:ann@example.com", "email:ann@example.com"),
        ("+49 (0) 123-45", "phone:+49012345"),
        ("0123/45.6", "phone:0123456"),
        ("whatsapp:+49123", "phone:+49123"),
    ],
)
def test_an_address_may_be_named_in_several_ways(text: str, address: str) -> None:
    assert named_addresses([text]) == {address}


@pytest.mark.parametrize("text", ["", "@", "a@", "@gmail.com", "ann", "ann 49", "a b@c", "+", "1x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(EngageError, match="neither an e-mail address nor a phone number"):
        named_addresses([text])


NESTED = json.dumps({"Message": json.dumps({"bounce": {"to": [{"emailAddress": ANN}]}})})
FOUND = [
    b'[{"email":"ann@example.com"}]',
    b'{"email": " Ann@EXAMPLE.com "}',
    b'{"email":"ann\\u0040example.com"}',
    b'{"to":["joe@example.com","Ann B. <ann@example.com>"]}',
    b'{"to":"joe@example.com, \\"B., Ann\\" <ann@example.com>"}',
    b'{"recipient":"rfc822;ann@example.com"}',
    b'{"ann@example.com":{"status":"bounced"}}',
    NESTED.encode(),
    f"mandrill_events={quote(json.dumps([{'msg': {'email': ANN}}]))}".encode(),
    urlencode({"From": ANN, "Body": "hello"}).encode(),
    b'[{"email":"ann@example.com"},{"email":"joe@exam',
    b'\xff[{"email":"ann@example.com"}]'[1:],
    b"ann@example.com",
]
LEFT = [
    b'[{"email":"joann@example.com"}]',
    b'[{"email":"ann@example.com.au"}]',
    b'[{"email":"ann@example.community"}]',
    b'[{"email":"o\'ann@example.com"}]',
    b'[{"email":"x+ann@example.com"}]',
    b'{"Body":"write to ann@example.com soon"}',
    urlencode({"From": "joann@example.com", "Body": "to ann@example.com now"}).encode(),
    b'{"email":"ann@example"}',
    b'{"broken":"\\x"}',
    b"",
]


@pytest.mark.parametrize("item", FOUND)
def test_an_address_is_found_whole_in_a_delivery(item: bytes) -> None:
    assert f"email:{ANN}" in set(addresses_in(item))


@pytest.mark.parametrize("item", LEFT)
def test_a_part_of_an_address_is_not_the_address(item: bytes) -> None:
    assert f"email:{ANN}" not in set(addresses_in(item))


def test_a_number_in_a_delivery_is_found() -> None:
    item = urlencode({"From": "whatsapp:+49123", "Body": "1, 2; +49"}).encode()
    assert "phone:+49123" in set(addresses_in(item))


# ------------------------------------------------------------------------------------ what is taken
@on_each
async def test_a_claimed_address_reaches_nothing_of_another(store: Any, tmp_path: Path) -> None:
    """Anyone who has the public key can give their user the address of another person."""
    await store.write(
        [
            identify("m1", "victim", 1, traits={"email": ANN, "phone": "+49123"}),
            event("m2", anonymous_id=f"email:{ANN}", origin="sendgrid", at=2),
            identify("m3", "mallory", 3, traits={"email": ANN, "phone": "+49 123"}),
            event("m4", type="identify", anonymous_id="v", at=2, traits={"email": "@"}),
            event("m5", user_id="mallory", anonymous_id="v", at=4),
        ]
    )
    await store.suppress([suppression(ANN), suppression("+49123", channel="sms")])
    await store.put([delivery(1, b'{"email":"ann@example.com"}'), delivery(2, b'{"email":"a@b"}')])
    found = await exported(store, tmp_path, "mallory")
    assert {one["record"] for one in found} == {"users", "events"}
    assert {one.get("messageId") for one in found} == {None, "m3", "m5"}
    receipt = await erased(store, tmp_path, "mallory")
    assert (receipt.counts["suppressions"], receipt.counts["deadLetters"]) == (0, 0)
    assert receipt.counts["events"] == 2
    assert receipt.addresses == []
    assert set(receipt.other_addresses) == {ANN, "+49123"}
    assert len(await store.suppressions("acme", [("email", ANN), ("sms", "+49123")])) == 2
    assert await letters(store) == {"l1", "l2"}
    assert await store.find("acme", "sendgrid", "m2") is not None
    assert (await store.profile("acme", "victim")).traits["email"] == ANN


@on_each
async def test_a_named_address_is_taken_whoever_claims_it(store: Any, tmp_path: Path) -> None:
    """Forty users have the address; the operator knows whose it is."""
    await store.write(
        [identify(f"m{n}", f"u{n}", n, traits={"email": ANN}) for n in range(40)]
        + [event("w", anonymous_id=f"email:{ANN}", origin="sendgrid", at=99)]
    )
    await store.suppress([suppression(ANN), suppression("joe@example.com")])
    await store.put(
        [
            delivery(1, b'{"email":"ann@example.com"}'),
            delivery(2, b'{"email":"joann@example.com"}'),
            letter("l3", user_id=None, item=b'{"email":"ann@example.com"}'),
        ]
    )
    workspace = config(tmp_path).workspaces[0]
    person = await person_of(store, workspace, "u7")
    others = await other_addresses(store, workspace, person)
    assert others == {ANN: True}
    found = await exported(store, tmp_path, "u7", ANN)
    kinds = [one["record"] for one in found]
    assert kinds == ["users", "suppressions", "dead-letters", "events", "events"]
    receipt = await erased(store, tmp_path, "u7", "Ann@Example.com")
    assert (receipt.addresses, receipt.other_addresses) == ([ANN], [])
    counted = {name: count for name, count in receipt.counts.items() if count}
    assert counted == {"events": 2, "deadLetters": 1, "suppressions": 1, "users": 1}
    hashed = hashed_address(KEY, "acme", "email", ANN)
    assert len(await store.suppressions("acme", [("email", hashed)])) == 1
    assert await store.suppressions("acme", [("email", ANN)]) == []
    assert await letters(store) == {"l2", "l3"}
    users = await all_pages(store.scan_users, "acme")
    assert len([user for user in users if user.traits["email"] == ANN]) == 39
    (entry,) = [line for line in await lines(store) if b"user-erased" in line]
    assert ANN.encode() not in entry
    details = orjson.loads(entry.partition(b" ")[2])["details"]
    assert details["addresses"] == [hash_of(KEY, "acme", f"email:{ANN}")]


async def test_an_id_that_looks_like_an_address_is_not_one(tmp_path: Path) -> None:
    """Also a user id can be chosen by anyone."""
    store: Any = MemoryStore()
    await store.write(
        [
            event("m1", anonymous_id=f"email:{ANN}", origin="sendgrid"),
            identify("m2", f"email:{ANN}", 2),
        ]
    )
    await store.suppress([suppression(ANN)])
    found = await exported(store, tmp_path, f"email:{ANN}")
    assert [one.get("messageId") for one in found] == [None, "m2"]
    receipt = await erased(store, tmp_path, f"email:{ANN}")
    assert (receipt.counts["events"], receipt.counts["suppressions"]) == (1, 0)
    assert await store.find("acme", "sendgrid", "m1") is not None


# ------------------------------------------------------------------------------------- repeating it
@pytest.mark.parametrize("what", ["suppression", "letter", "event"])
async def test_a_named_address_is_erased_again_from_a_backup(tmp_path: Path, what: str) -> None:
    """The file has hashes only, so the address is compared wherever the backup has it."""
    store, backup = MemoryStore(), MemoryStore()
    await erased(store, tmp_path, "ann", ANN)
    if what == "suppression":
        await backup.suppress([suppression(ANN), suppression("joe@example.com")])
    elif what == "letter":
        await backup.put(
            [delivery(n, b'{"email":"%sann@example.com"}' % b"jo"[:n]) for n in (0, 2)]
        )
    else:
        await backup.write([event("m1", anonymous_id=f"email:{ANN}", origin="sendgrid")])
    known, _ = erasures.read(erasures.erasures_path(config(tmp_path)), KEY)
    await repeat(backup, config(tmp_path), known)
    hashed = hashed_address(KEY, "acme", "email", ANN)
    suppressed = await all_pages(backup.scan_suppressions, "acme")
    addresses = {"joe@example.com", hashed} if what == "suppression" else set()
    assert {one.address for one in suppressed} == addresses
    assert await letters(backup) == ({"l2"} if what == "letter" else set())
    assert await backup.find("acme", "sendgrid", "m1") is None


# ----------------------------------------------------------------------------------- ids of changes
@on_each
async def test_the_id_of_a_change_tells_no_id_of_a_person(store: Any, tmp_path: Path) -> None:
    """It is computed from the id of the user, so it could be found by trying ids."""
    ids = {str(uuid.uuid5(uuid.NAMESPACE_URL, name)): name for name in ("ann", "bob")}
    for change_id, name in ids.items():
        await store.apply(change(change_id, name))
        both = change(f"{change_id}-2", name, choices={"news": True, "offers": True}, at=9)
        await store.apply(both)
    await erased(store, tmp_path, "ann")
    history = await all_pages(store.history, "acme", None)
    of_ann = [one for one in history if one.user_id != "bob"]
    assert len(of_ann) == 3
    known = {*ids, *(f"{one}-2" for one in ids)}
    assert not known & {one.change_id for one in of_ann}
    assert len({one.change_id for one in of_ann}) == 2
    assert {one.change_id for one in history if one.user_id == "bob"} <= known
    # A late retry is still known.
    for change_id, name in ids.items():
        await store.apply(dataclasses.replace(change(change_id, name), choices={"news": True}))
    assert await store.state("acme", Subject(Kind.USER, "ann")) == {}
    assert len(await all_pages(store.history, "acme", None)) == len(history)
