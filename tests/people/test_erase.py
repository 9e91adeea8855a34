# SPDX-License-Identifier: Apache-2.0
"""A person is erased from every part of a store, and others are not."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from engage.api import EngageError, Kind, Status, StorageContext, StorageUnavailable
from engage.audit import record_audit
from engage.config import SubscriptionGroup
from engage.config import erasures_file as erasures
from engage.config.erasures_file import ErasuresFileError
from engage.people.addresses import named_addresses
from engage.people.erase import Receipt, erase_user, repeat
from engage.people.person import export_person, person_of
from engage.people.requests import erasure_requests, note_requests
from engage.people.tombstones import Tombstones, put_tombstones
from engage.store.erasures import mark_of
from engage.store.keys import fingerprint, hash_of
from engage.store.suppressions import hashed_address
from engage.testing import MemoryStore
from engage.testing.factories import TIME, all_pages, event, identify, letter, suppression, visitor
from engage.testing.factories import ids as ids_of
from support.loaders import caught_up, loading, put
from support.memory_log import MemoryBroker
from support.memory_store import events_of, letters_of
from support.people import ACTOR, ADDRESSES, KEY, config, fill, lines, on_each, traces
from support.rules.erasures import change
from support.sqlite import make
from support.verifying import full

#: The methods that change a store.
STEPS = ("run", "settle")


def counting(store: Any, reached: Callable[[], None], *, after: bool = False) -> None:
    """Call a function before each change of a store, and after it."""
    for name in STEPS:
        method = getattr(store, name)

        async def step(*arguments: Any, method: Any = method, **named: Any) -> Any:
            reached()
            result = await method(*arguments, **named)
            if after:
                reached()
            return result

        setattr(store, name, step)


async def erased(store: Any, folder: Path, user_id: str = "ann", **options: Any) -> Receipt:
    options.setdefault("addresses", ADDRESSES if user_id == "ann" else ())
    return await erase_user(store, config(folder), "acme", user_id, actor=ACTOR, **options)


@on_each
async def test_all_of_a_person_is_erased_and_others_stay(store: Any, tmp_path: Path) -> None:
    await fill(store)
    before = await lines(store)
    other = await lines(store, "other")
    receipt = await erased(store, tmp_path)
    assert await traces(store) == []
    after = await lines(store)
    kept = [line for line in before if b"bob" in line and not line.startswith(b"users ")]
    assert [line for line in after if line in kept] == kept
    assert [x for x in await lines(store, "other") if x.startswith((b"ev", b"us"))] == [
        line for line in other if line.startswith((b"ev", b"us"))
    ]
    assert receipt.existed
    assert receipt.counts == {
        "events": 8,
        "deadLetters": 3,
        "auditEntries": 1,
        "suppressions": 2,
        "requests": 0,
        "choices": 2,
        "subscriptionHistory": 2,
        "undoneLinks": 1,
        "visitors": 1,
        "users": 1,
    }
    assert (receipt.addresses, receipt.other_addresses) == (["ann@x.org", "+49123"], [])
    assert receipt.user == hash_of(KEY, "acme", "ann")
    (entry,) = [line for line in after if b"user-erased" in line]
    assert receipt.user.encode() in entry
    # The erased visitor is not the next user's, and that one keeps its own.
    bob = await store.profile("acme", "bob")
    assert bob.traits == {"email": "bob@x.org", "city": "Bonn"}
    assert bob.anonymous_ids == ["b1"]


@on_each
async def test_a_late_retry_stores_nothing_and_a_later_event_is_new(
    store: Any, tmp_path: Path
) -> None:
    await fill(store)
    await erased(store, tmp_path)
    late = [
        identify("m1", "ann", 1, traits={"email": "ANN@x.org"}),
        event("m3", anonymous_id="a1", at=1),
    ]
    outcomes = await store.write(late)
    marks = [mark_of(one, KEY) for one in late]
    assert [outcome.stored for outcome in outcomes] == marks
    assert {outcome.status for outcome in outcomes} == {Status.DUPLICATE}
    assert len({*marks}) == 2
    assert await traces(store) == []
    await store.write([event("n1", user_id="ann", anonymous_id="a1", at=2**40)])
    await store.write([identify("n2", "ann", 2**40, traits={"plan": "b"})])
    profile = await store.profile("acme", "ann")
    assert (profile.traits, profile.anonymous_ids) == ({"plan": "b"}, ["a1"])


@on_each
async def test_the_visitors_of_a_user_without_a_profile_are_erased(
    store: Any, tmp_path: Path
) -> None:
    """Only `identify` and `group` make a profile, but each event with both ids makes a link. An
    anonymous id may have the text of another's user id."""
    await store.write(
        [
            event("m1", type="identify", anonymous_id="a1", traits={"email": "ann@x.org"}),
            event("m2", anonymous_id="a1", at=1),
            event("m3", user_id="ann", anonymous_id="a1", at=2),
            event("m4", user_id="ann", anonymous_id="bob", at=3),
            identify("m5", "bob", 4),
            event("m6", anonymous_id="bob", at=5),
        ]
    )
    assert await store.profile("acme", "ann") is None
    workspace = config(tmp_path).workspaces[0]
    whom = ("ann", ADDRESSES, ["a1", "bob"])
    exported = [orjson.loads(line) async for line in export_person(store, workspace, *whom)]
    receipt = await erased(store, tmp_path, visitors=["a1", "bob"])
    assert (receipt.counts["events"], receipt.counts["visitors"]) == (5, 1)
    assert {one.get("messageId") for one in exported} == {None, "m1", "m2", "m3", "m4", "m6"}
    assert await traces(store) == []
    assert await ids_of(store) == ["m5"]


@on_each
async def test_what_is_received_during_it_makes_a_new_user(store: Any, tmp_path: Path) -> None:
    await fill(store)
    number = 0

    async def later(step: str) -> None:
        nonlocal number
        number += 1
        at = 2**40 + number
        await store.write(
            [
                identify(f"n{number}", "ann", at, traits={f"t{number}": step}),
                event(f"k{number}", user_id="ann", anonymous_id="a1", at=at),
                event(f"v{number}", type="identify", anonymous_id="a1", at=at, traits={"new": 1}),
            ]
        )

    for name in ("erase_events", "erase_profile", "settle", "reapply"):
        method = getattr(store, name)

        async def beside(*arguments: Any, name: str = name, method: Any = method) -> Any:
            await later(name)
            result = await method(*arguments)
            await later(name)
            return result

        setattr(store, name, beside)
    await erased(store, tmp_path)
    profile = await store.profile("acme", "ann")
    names = {f"t{one}" for one in range(1, number + 1)}
    assert profile.traits.keys() == names | {"new"}
    assert profile.anonymous_ids == ["a1"]


@on_each
async def test_what_a_second_erasure_covers_is_not_applied_again(
    store: Any, tmp_path: Path
) -> None:
    """Two at once: the first one applies again what was received between them."""
    await fill(store)
    settle = store.settle

    async def second() -> Any:
        await store.write([identify("n1", "ann", 2**40, traits={"email": "ann@x.org"})])
        hashed = hash_of(KEY, "acme", "ann")
        key = fingerprint(KEY)
        one = erasures.Erasure(workspace="acme", kind="user", hash=hashed, at=2**42, key=key)
        await put_tombstones(store, [one])
        await store.erase_profile("acme", Kind.USER, "ann")
        return await settle()

    store.settle = second
    await erased(store, tmp_path)
    assert await store.profile("acme", "ann") is None


@on_each
async def test_the_receipt_of_an_unknown_id_says_so(store: Any, tmp_path: Path) -> None:
    await fill(store)
    before = await lines(store)
    for name in ("nobody", "g", "", "\ud800"):
        if name == "\ud800":
            with pytest.raises(EngageError, match="not Unicode"):
                await erased(store, tmp_path, name)
            continue
        receipt = await erased(store, tmp_path, name)
        assert not receipt.existed
        assert not any(receipt.counts.values())
    kept = [line for line in await lines(store) if not line.startswith((b"audit", b"erasure"))]
    assert kept == [line for line in before if not line.startswith((b"audit", b"erasure"))]


@on_each
async def test_twice_at_once(store: Any, tmp_path: Path) -> None:
    await fill(store)
    receipts = await asyncio.gather(*(erased(store, tmp_path) for _ in range(2)))
    assert await traces(store) == []
    assert sum(receipt.counts["events"] for receipt in receipts) >= 8
    again = await erased(store, tmp_path)
    assert not again.existed


@on_each
async def test_two_people_at_once(store: Any, tmp_path: Path) -> None:
    """Neither replaces the tombstone of the other, nor its line in the file."""
    await fill(store)
    receipts = await asyncio.gather(*(erased(store, tmp_path, name) for name in ("ann", "bob")))
    assert await traces(store) == []
    tombstones = Tombstones(store, KEY)
    await tombstones.refresh()
    for name, receipt in zip(("ann", "bob"), receipts, strict=True):
        assert tombstones.cover("acme", name, None, receipt.at - 1)
    noted, _ = erasures.read(erasures.erasures_path(config(tmp_path)), KEY)
    assert {receipt.at for receipt in receipts} == {erasure.at for erasure in noted}


@pytest.mark.virtual_time
async def test_it_waits_if_the_writer_does_not_look_for_erasures(tmp_path: Path) -> None:
    """Such as a server that started before its config had the key."""
    for key, waits in ((KEY, False), (None, True), (KEY[::-1], True)):
        context = StorageContext(base_dir=tmp_path, identifiers={}, erasures_key=key)
        store: Any = MemoryStore(None, context)
        await fill(store)
        steps: list[str] = []
        await erased(store, tmp_path, report=lambda step, _, to=steps: to.append(step))
        assert ("waiting for the requests of this moment" in steps) is waits, key
        assert await traces(store) == []


@on_each
async def test_nothing_is_erased_without_a_key_or_a_file(store: Any, tmp_path: Path) -> None:
    await fill(store)
    before = await lines(store)
    with pytest.raises(EngageError, match="no key for erasures"):
        await erase_user(store, config(tmp_path, key=None), "acme", "ann", actor=ACTOR)
    with pytest.raises(ErasuresFileError, match="cannot be written"):
        await erase_user(store, config(tmp_path / "none"), "acme", "ann", actor=ACTOR)
    assert await lines(store) == before
    await erased(store, tmp_path, "nobody")
    path, before = tmp_path / "engage.toml.erasures", await lines(store)
    noted = path.read_bytes()
    with pytest.raises(ErasuresFileError, match="a hash of another key"):
        await erase_user(store, config(tmp_path, key=KEY[::-1]), "acme", "ann", actor=ACTOR)
    assert (await lines(store), path.read_bytes()) == (before, noted)


@on_each
async def test_the_suppressed_address_is_kept_as_a_hash(store: Any, tmp_path: Path) -> None:
    await fill(store)
    await erased(store, tmp_path)
    hashed = hashed_address(KEY, "acme", "email", "ann@x.org")
    suppressions = await store.suppressions("acme", [("email", hashed), ("email", "ann@x.org")])
    bounce, objection = sorted(suppressions, key=lambda one: one.reason)
    assert (bounce.address, bounce.reason, bounce.at) == (hashed, "bounce", TIME)
    # She had unsubscribed: whoever gets the address later has not, and nothing is to be sent.
    assert (objection.address, objection.reason) == (hashed, "objection")
    assert (objection.group_id, objection.how) == ("news", "erasure")


@on_each
async def test_certain_addresses_are_taken(store: Any, tmp_path: Path) -> None:
    """By an erasure and an export, without being named."""
    await fill(store)
    mark = {"engage": {"trusted": ["email"]}}
    values = {"email": "ann@x.org", "phone": "+49 123"}
    await store.write([identify("sure", "ann", 10**9, traits=values, context=mark)])
    await store.suppress([suppression("ann@x.org")])
    workspace = config(tmp_path).workspaces[0]
    found = [orjson.loads(line) async for line in export_person(store, workspace, "ann")]
    shown = {one["address"] for one in found if one["record"] == "suppressions"}
    assert shown == {"ann@x.org"}
    assert all("engage:" not in name for one in found for name in one.get("traits") or ())
    receipt = await erased(store, tmp_path, addresses=())
    assert receipt.addresses == ["ann@x.org"]
    assert receipt.other_addresses == ["+49123"]
    wanted = [("email", "ann@x.org"), ("whatsapp", "+49123")]
    assert {one.address for one in await store.suppressions("acme", wanted)} == {"+49123"}
    assert await store.certain("acme", "ann") == {}


@on_each
async def test_an_address_that_a_server_key_set_before_the_mark_is_certain(
    store: Any, tmp_path: Path
) -> None:
    await store.write(
        [
            identify("1", "ann", 1, traits={"email": "Ann@x.org"}, writeKeyId="backend"),
            identify("2", "ann", 2, traits={"phone": "+49 123"}, writeKeyId="website"),
            identify("3", "bob", 2, traits={"email": "bob@x.org"}, writeKeyId="backend"),
            identify("4", "bob", 3, traits={"email": "eve@x.org"}, writeKeyId="website"),
        ]
    )
    workspace = config(tmp_path).workspaces[0]
    assert (await person_of(store, workspace, "ann")).addresses == ["email:ann@x.org"]
    assert (await person_of(store, workspace, "bob")).addresses == []
    # The event with the value of now may have expired.
    later = identify("5", "cat", 9, traits={"email": "new@x.org"}, writeKeyId="website")
    await store.write(
        [later, identify("6", "cat", 1, traits={"email": "cat@x.org"}, writeKeyId="backend")]
    )
    await store.erase_events([later], [b""])
    assert (await person_of(store, workspace, "cat")).addresses == []


@on_each
async def test_what_an_erased_person_does_not_want_stays_for_each_address(
    store: Any, tmp_path: Path
) -> None:
    """Of each group from which the user or a visitor unsubscribed, and of no other."""
    channels = {"news": "email", "ads": "email", "tips": "email", "texts": "sms", "calls": "sms"}
    settings = config(tmp_path)
    groups = [
        SubscriptionGroup(id=name, name=name, channel=channel, type="opt_out")
        for name, channel in channels.items()
    ]
    workspace = dataclasses.replace(settings.workspaces[0], subscription_groups=tuple(groups))
    settings = dataclasses.replace(settings, workspaces=(workspace,))
    chosen = {"news": False, "texts": False, "tips": True, "calls": True, "gone": False}
    await store.apply(change("c1", "ann", choices=chosen))
    await store.apply(change("c2", "", subject=visitor("a1"), choices={"ads": False}))
    await store.apply(change("c3", "", subject=visitor("a2"), choices={"tips": False}))
    reported = suppression("ann@x.org", reason="bounce", group_id="news", source_id="m of ann")
    other = suppression("bob@x.org", group_id="news", source_id="m of bob")
    await store.suppress([reported, other])
    addresses = {"email": ("ann@x.org", "ann@y.org"), "sms": ("+49123",)}
    await erase_user(
        store,
        settings,
        "acme",
        "ann",
        actor=ACTOR,
        addresses=named_addresses(one for some in addresses.values() for one in some),
        visitors=["a1"],
    )

    def hashed(channel: str, address: str) -> str:
        return hashed_address(KEY, "acme", channel, address)

    suppressions = await all_pages(store.scan_suppressions, "acme")
    objections = [one for one in suppressions if one.reason == "objection"]
    assert {(one.channel, one.address, one.group_id) for one in objections} == {
        (channels[group], hashed(channels[group], address), group)
        for group in ("news", "ads", "texts")
        for address in addresses[channels[group]]
    }
    kept = dataclasses.replace(reported, address=hashed("email", "ann@x.org"), source_id="")
    assert [one for one in suppressions if one.reason == "bounce"] == [kept]
    assert [one for one in suppressions if one.address == "bob@x.org"] == [other]
    assert len(suppressions) == len(objections) + 2


@on_each
async def test_a_visitor_with_the_text_of_the_user_id_does_not_object(
    store: Any, tmp_path: Path
) -> None:
    """The user subscribed again; or the link of a visitor made the choice."""
    await fill(store)
    await store.apply(change("c4", "ann", choices={"news": True}))
    await store.apply(change("c5", "", subject=visitor("ann"), choices={"news": False}))
    await erased(store, tmp_path)
    assert await store.state("acme", visitor("ann")) == {}
    hashed = hashed_address(KEY, "acme", "email", "ann@x.org")
    assert [one.reason for one in await store.suppressions("acme", [("email", hashed)])] == [
        "bounce"
    ]


@pytest.mark.virtual_time
async def test_it_goes_on_after_a_failure_at_every_step(tmp_path: Path) -> None:
    """The store fails before the n-th change, for each n; another call erases the rest."""
    for fails_at in range(99):
        store: Any = MemoryStore()
        await fill(store)
        left = fails_at

        def reached() -> None:
            nonlocal left
            left -= 1
            if left == -1:
                raise StorageUnavailable("not now")

        counting(store, reached)
        try:
            await erased(store, tmp_path)
        except StorageUnavailable:
            await erased(store, tmp_path)
            assert await traces(store) == [], fails_at
            hashed = hashed_address(KEY, "acme", "email", "ann@x.org")
            left_of = await store.suppressions("acme", [("email", hashed)])
            assert {one.reason for one in left_of} == {"bounce", "objection"}, fails_at
            assert (await store.profile("acme", "bob")).anonymous_ids == ["b1"]
        else:
            assert fails_at > 15
            return
    raise AssertionError("it never ended")


def _killed(folder: Path, at: int) -> None:
    """Erase, and kill this process before or after a change of the store."""

    async def run() -> None:
        store: Any = make(folder)
        await store.open(create=True)
        left = at

        def reached() -> None:
            nonlocal left
            left -= 1
            if left == -1:
                os.kill(os.getpid(), signal.SIGKILL)

        counting(store, reached, after=True)
        await erased(store, folder)
        await store.close()

    asyncio.run(run())


@pytest.mark.long
async def test_it_goes_on_after_a_kill_at_every_step_on_sqlite(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    for at in range(99):
        folder = tmp_path / str(at)
        folder.mkdir()
        store: Any = make(folder)
        await store.open(create=True)
        await fill(store)
        await store.close()
        process = context.Process(target=_killed, args=(folder, at))
        process.start()
        process.join()
        store = make(folder)
        await store.open(create=True)
        if process.exitcode == 0:
            assert at > 30
            assert await traces(store) == []
            await store.close()
            return
        assert process.exitcode == -signal.SIGKILL
        await erased(store, folder)
        assert await traces(store) == [], at
        assert (await store.profile("acme", "bob")).anonymous_ids == ["b1"]
        await store.close()
    raise AssertionError("it never ended")


async def test_the_bytes_are_gone_from_the_files_of_sqlite(tmp_path: Path) -> None:
    store: Any = make(tmp_path)
    await store.open(create=True)
    await fill(store)
    large = "large-" * 2000
    people = [
        identify(f"p{n}", f"person-{n}-xyz", n, traits={"email": f"p{n}-xyz@x.org", "long": large})
        for n in range(60)
    ]
    await store.write(people)
    receipt = await erased(store, tmp_path)
    assert receipt.overwritten
    for n in range(0, 60, 10):
        await store.write([event(f"q{n}", user_id=f"person-{n}-xyz", anonymous_id=f"vis-{n}-xyz")])
        await erased(store, tmp_path, f"person-{n}-xyz")
    data = b"".join((tmp_path / f"engage.db{end}").read_bytes() for end in ("", "-wal"))
    for n in range(60):
        there = [f"{text}".encode() in data for text in (f"person-{n}-xyz", f"p{n}-xyz@x.org")]
        assert there == [n % 10 != 0] * 2, n
        assert f"vis-{n}-xyz".encode() not in data
    assert b"ANN@x.org" not in data
    assert b"ann@x.org" not in data
    await store.close()


async def test_a_reader_such_as_a_backup_is_named_in_the_receipt(tmp_path: Path) -> None:
    store: Any = make(tmp_path)
    await store.open(create=True)
    await fill(store)
    with contextlib.closing(sqlite3.connect(tmp_path / "engage.db")) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM events").fetchone() == (13,)
        receipt = await erased(store, tmp_path)
        assert not receipt.overwritten
        assert await traces(store) == []
        # The reader has its snapshot, and nothing else.
        query = "SELECT count(*) FROM events WHERE type = 'erased'"
        assert reader.execute(query).fetchone() == (0,)
    assert (await erased(store, tmp_path)).overwritten
    data = b"".join((tmp_path / f"engage.db{end}").read_bytes() for end in ("", "-wal"))
    assert b"ANN@x.org" not in data
    await store.close()


# ---------------------------------------------------------------------------------------- repeating
@on_each
async def test_a_file_is_repeated_on_a_store_from_before(store: Any, tmp_path: Path) -> None:
    await fill(store)
    await erased(store, tmp_path)
    known, _ = erasures.read(erasures.erasures_path(config(tmp_path)), KEY)
    backup: Any = MemoryStore()
    await fill(backup)
    await backup.write([identify("n1", "ann", 2**40, traits={"plan": "new"})])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    counts = await repeat(backup, config(elsewhere), known)
    assert (counts["events"], counts["users"], counts["visitors"]) == (8, 1, 1)
    await backup.erase_events([identify("n1", "ann", 2**40)], [b""])
    assert (await backup.profile("acme", "ann")).traits == {"plan": "new"}
    await backup.erase_profile("acme", Kind.USER, "ann")
    assert await traces(backup) == []
    assert (await backup.profile("acme", "bob")).anonymous_ids == ["b1"]
    # The other config has them too, and each store knows what it has carried out.
    assert erasures.read(erasures.erasures_path(config(elsewhere)), KEY)[0] == known
    for one in (store, backup):
        assert await repeat(one, config(elsewhere), known) == {}
    assert erasures.read(erasures.erasures_path(config(elsewhere)), KEY)[0] == known


async def test_a_request_that_a_backup_brings_back_is_erased_again(tmp_path: Path) -> None:
    """Also if nothing else is known of the user."""
    store, backup = MemoryStore(), MemoryStore()
    for one in (store, backup):
        await note_requests(one, "acme", "segment", ["ann", "bob"], now=TIME)
    await erased(store, tmp_path)
    known, _ = erasures.read(erasures.erasures_path(config(tmp_path)), KEY)
    assert (await repeat(backup, config(tmp_path), known))["requests"] == 1
    for one in (store, backup):
        left = [request.user_id async for request in erasure_requests(one, "acme", [])]
        assert left == ["bob"]


async def test_two_people_of_a_file_do_not_share_a_pseudonym(tmp_path: Path) -> None:
    empty, backup = MemoryStore(), MemoryStore()
    for user_id in ("ann", "bob"):
        await erased(empty, tmp_path, user_id)
    await fill(backup)
    known, _ = erasures.read(erasures.erasures_path(config(tmp_path)), KEY)
    await repeat(backup, config(tmp_path), known)
    history = (await backup.history("acme", None, after=None, limit=9)).items
    # Of ann two, under her id and that of her visitor, and one of bob.
    names = {one.subject.id for one in history}
    assert all(name.startswith("erased-") for name in names)
    assert len(names) == 3


async def test_an_erasure_that_was_interrupted_is_repeated_in_whole(tmp_path: Path) -> None:
    store: Any = MemoryStore()
    await fill(store)

    async def fails(*_: Any) -> int:
        raise StorageUnavailable("not now")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "erase_choices", fails)
        with contextlib.suppress(StorageUnavailable):
            await erased(store, tmp_path)
    known, _ = erasures.read(erasures.erasures_path(config(tmp_path)), KEY)
    await repeat(store, config(tmp_path), known)
    assert await traces(store) == []


# --------------------------------------------------------------------------------------- tombstones
@on_each
async def test_tombstones_cover_what_was_received_before(store: Any, tmp_path: Path) -> None:
    await fill(store)
    tombstones = Tombstones(store, KEY)
    await tombstones.refresh()
    assert not tombstones.cover("acme", "ann", None, TIME)
    receipt = await erased(store, tmp_path)
    await tombstones.refresh()
    cases: list[tuple[tuple[str | None, str | None], bool]] = [
        (("ann", None), True),
        (("ann", "x"), True),
        ((None, "a1"), True),
        ((None, "email:ann@x.org"), True),
        (("bob", "a1"), False),
        ((None, "b1"), False),
        (("a1", None), False),
        ((None, None), False),
    ]
    for ids, covered in cases:
        assert tombstones.cover("acme", *ids, receipt.at - 1) is covered, ids
        assert not tombstones.cover("acme", *ids, receipt.at)
        assert not tombstones.cover("other", *ids, receipt.at - 1)
    none = Tombstones(store, None)
    await none.refresh()
    assert not none.cover("acme", "ann", None, TIME)


# ---------------------------------------------------------------------------------------- exporting
@on_each
async def test_everything_about_a_person_is_exported(store: Any, tmp_path: Path) -> None:
    await fill(store)
    about = {"workspace": "acme", "user": "bob", "anonymousId": "a1"}
    await record_audit(store, ACTOR, "anonymous-id-linked", about, now=TIME)
    await record_audit(store, ACTOR, "key-disabled", {"workspace": "ann", "key": "k"}, now=TIME)
    await store.suppress([suppression("ann@x.org", lifted=True), suppression("eve@x.org")])
    workspace = config(tmp_path).workspaces[0]
    found = [orjson.loads(line) async for line in export_person(store, workspace, "ann", ADDRESSES)]
    by_kind: dict[str, list[Any]] = {}
    for one in found:
        by_kind.setdefault(one.pop("record"), []).append(one)
    assert [user["userId"] for user in by_kind["users"]] == ["ann"]
    assert [one["anonymousId"] for one in by_kind["visitors"]] == ["a1"]
    assert {one["changeId"] for one in by_kind["subscription-history"]} == {"c1", "c2"}
    assert len(by_kind["subscriptions"]) == 2
    assert {one["address"] for one in by_kind["suppressions"]} == {"ann@x.org", "+49123"}
    assert {one["reason"] for one in by_kind["suppressions"]} == {"bounce", "stop", "complaint"}
    assert {one["id"] for one in by_kind["dead-letters"]} == {"l1", "l2", "l3"}
    assert {entry["action"] for entry in by_kind["audit"]} == {
        *("anonymous-id-linked", "anonymous-id-unlinked")
    }
    ids = {one["messageId"] for one in by_kind["events"]}
    assert ids == {"m1", "m2", "m3", "m4", "m6", "m10", "m11", "m12"}
    assert [line async for line in export_person(store, workspace, "nobody")] == []


@on_each
async def test_an_address_in_the_audit_becomes_a_hash(store: Any, tmp_path: Path) -> None:
    """`engage suppressions remove` notes the address."""
    await fill(store)
    about = {"workspace": "acme", "channel": "email", "address": "ann@x.org"}
    await record_audit(store, ACTOR, "suppression-removed", about, now=TIME)
    await record_audit(
        store, ACTOR, "suppression-removed", about | {"address": "bob@x.org"}, now=TIME
    )
    workspace = config(tmp_path).workspaces[0]
    found = [orjson.loads(line) async for line in export_person(store, workspace, "ann", ADDRESSES)]
    assert [one["details"] for one in found if one.get("action") == "suppression-removed"] == [
        about
    ]
    receipt = await erased(store, tmp_path)
    assert receipt.counts["auditEntries"] == 2
    assert await traces(store) == []
    noted = [orjson.loads(x.partition(b" ")[2]) for x in await lines(store) if b"-removed" in x]
    hashed = hash_of(KEY, "acme", "ann@x.org")
    assert {one["details"]["address"] for one in noted} == {hashed, "bob@x.org"}


# --------------------------------------------------------------------------------------- with a log
async def test_a_loader_drops_what_was_received_before_an_erasure(tmp_path: Path) -> None:
    store: Any = MemoryStore()
    broker = MemoryBroker()
    await fill(store)
    async with loading(broker, store, erasures_key=KEY) as loader:
        put(broker, event("k1", user_id="ann", at=1))
        await caught_up(broker)
        receipt = await erased(store, tmp_path)
        at = receipt.at - TIME
        put(
            broker,
            identify("k2", "ann", at - 1, traits={"email": "ANN@x.org"}),
            event("k3", anonymous_id="a1", at=at - 1),
            event("k4", user_id="bob", anonymous_id="a1", at=at - 1),
            event("k5", user_id="ann", at=at),
            letter("k6", user_id="ann", received_at=receipt.at - 1),
            letter("k7", user_id="ann", received_at=receipt.at),
        )
        await caught_up(broker)
        # A late retry of an erased event, and another's event with its message id.
        put(
            broker,
            event("m3", anonymous_id="a1", at=at, properties={"late": True}),
            full("m3", user_id="bob", at=at),
        )
        await caught_up(broker)
    expected = {"stored": 3, "erased": 3, "letter": 1, "duplicate": 1, "conflict": 1}
    assert loader.metrics.loads == expected
    (kept,) = [one for one in letters_of(store).values() if one.message_id == "m3"]
    assert (kept.user_id, kept.reason) == ("bob", "message_id_conflict")
    message_ids = {one.message_id for one in events_of(store).values()}
    assert {"k4", "k5"} <= message_ids
    assert not message_ids & {"k1", "k2", "k3"}
    assert ("acme", "k6") not in letters_of(store)
    assert await store.profile("acme", "ann") is None
