# SPDX-License-Identifier: Apache-2.0
"""Verifying a store of any kind: what is different, what is unprovable, and a store in use."""

from __future__ import annotations

import dataclasses
import random
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engage import testing
from engage.api import (
    DAY_MS,
    OPERATOR_ORIGIN,
    Kind,
    ProfileLimits,
    StorageContext,
    StorageUnavailable,
    StoreProblem,
    Subject,
    SubscriptionChange,
)
from engage.store import letters
from engage.store.choices import HISTORY
from engage.store.events import EVENTS
from engage.store.people import Wrong, erase
from engage.store.profiles import (
    CHOICES,
    GROUP,
    LINKS,
    MEMBERSHIPS,
    PROFILES,
    REMOVED,
    TRAITS,
    USER,
    VISITOR,
    Profile,
)
from engage.store.tables import Delete, Put, Table
from engage.testing.factories import IDENTIFIERS, TIME, user, visitor
from engage.testing.storage.histories import everything
from engage.verify import Report
from support import memory_store
from support.memory_store import edit, run_steps
from support.verifying import fill, full, healthy, random_events, small, verified

DAY = DAY_MS


def made(**limits: int) -> Any:
    """Return a store in memory with some limits."""
    context = StorageContext(
        base_dir=Path(), identifiers=IDENTIFIERS, profile_limits=ProfileLimits(**limits)
    )
    return testing.MemoryStore(None, context)


def reasons(report: Report) -> set[tuple[str, str]]:
    """Return what is unprovable, and why."""
    return {key for key, count in report.unprovable.items() if count}


# ------------------------------------------------------------------------------------------ healthy
@pytest.mark.parametrize("seed", range(30))
async def test_a_healthy_store_has_no_differences(seed: int) -> None:
    store = made()
    await fill(store, seed=seed)
    report = await verified(store)
    healthy(report)
    assert report.checked["events"] == 400
    assert report.checked["links"] > 50
    assert reasons(report) <= {("users", "users with subscription changes")}


# ------------------------------------------------------------------------------------------- damage
ANN = ("acme", USER, "ann")
VISITOR_1 = ("acme", VISITOR, "a-1")
#: A version of no event.
#: A time that is later than those of all events.
NEW = TIME + 900_000
OTHER = (NEW, "m", "api")


def lose(store: Any, person: tuple[str, int, str]) -> None:
    store.stored.tables.execute(erase(*person), store.context)


def flip(store: Any) -> None:
    rows = store.stored.tables.rows(CHOICES)
    run_steps(store, Put(CHOICES, [(*row[:4], 1 - row[4], *row[5:]) for row in rows]))


def clear(table: Table) -> Callable[[Any], None]:
    """Return a function that deletes all rows of a table."""
    return lambda store: run_steps(
        store, Delete(table, [row[: table.key] for row in store.stored.tables.rows(table)])
    )


def lose_letter(store: Any) -> None:
    store.stored.tables.execute(letters.remove("acme", ["l3"]), store.context)


def cut(store: Any) -> None:
    letter = memory_store.letters_of(store)["acme", "l3"]
    lose_letter(store)
    changed = dataclasses.replace(letter, truncated=True)
    store.stored.tables.execute(letters.keep([changed]), store.context)


def replace(store: Any, **fields: Any) -> None:
    edit(store, EVENTS, "acme", "api", "seen", **fields)


DAMAGE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "an event that set a trait is lost": (
        "users",
        lambda store: run_steps(store, Delete(EVENTS, [("acme", "api", "i")])),
    ),
    "an event is not JSON": ("events", lambda store: replace(store, body=b"{")),
    "an event is not valid": (
        "events",
        lambda store: replace(
            store, body=full("seen", user_id="ann", at=900_000, event="").body, name=""
        ),
    ),
    "an event has another user": ("events", lambda store: replace(store, user_id="bob")),
    "an event has another time": ("events", lambda store: replace(store, received_at=5)),
    "a trait is changed": (
        "users",
        lambda store: edit(store, TRAITS, *ANN, "plan", value=b'"free"'),
    ),
    "true instead of 1": (
        "visitors",
        lambda store: edit(store, TRAITS, *VISITOR_1, "n", value=b"true"),
    ),
    "a trait is lost": (
        "users",
        lambda store: run_steps(store, Delete(TRAITS, [(*ANN, "plan")])),
    ),
    "what was certain is lost": (
        "users",
        lambda store: run_steps(store, Delete(TRAITS, [(*ANN, "engage:trusted:email")])),
    ),
    "a trait of no event": (
        "users",
        lambda store: run_steps(store, Put(TRAITS, [(*ANN, "x", NEW, b"1", "m", "api", 4)])),
    ),
    "a membership is lost": (
        "users",
        lambda store: run_steps(store, Delete(MEMBERSHIPS, [(*ANN, "crew")])),
    ),
    "a membership has ended": (
        "users",
        lambda store: edit(store, MEMBERSHIPS, *ANN, "crew", assigned=0),
    ),
    "a user is lost": (
        "users",
        lambda store: lose(store, ANN),
    ),
    "a user of no event": (
        "users",
        lambda store: run_steps(
            store,
            Put(PROFILES, [Profile("acme", USER, "eve", created_at=NEW, updated_at=NEW).row]),
        ),
    ),
    "a user was created later": (
        "users",
        lambda store: edit(store, PROFILES, *ANN, created_at=TIME + 1, updated_at=TIME + 900_000),
    ),
    "a visitor is lost": (
        "visitors",
        lambda store: lose(store, VISITOR_1),
    ),
    "a group's trait is changed": (
        "groups",
        lambda store: edit(store, TRAITS, "acme", GROUP, "crew", "size", value=b"9"),
    ),
    "a link is lost": (
        "links",
        lambda store: run_steps(store, Delete(LINKS, [(*ANN, "a-1")])),
    ),
    "a link has another version": (
        "links",
        lambda store: edit(store, LINKS, *ANN, "a-1", received_at=TIME + 500),
    ),
    "a link of no event": (
        "links",
        lambda store: run_steps(store, Put(LINKS, [(*ANN, "a-9", *OTHER, 0, "", "", 0)])),
    ),
    "a link does not count": (
        "links",
        lambda store: edit(store, LINKS, *ANN, "a-1", undone=1),
    ),
    "a size of no trait": (
        "sizes",
        lambda store: run_steps(store, Put(TRAITS, [(*ANN, "gone", 5, REMOVED, "m", "api", 1)])),
    ),
    "the letter of a conflict is lost": (
        "conflicts",
        lose_letter,
    ),
    "the letter of a conflict is cut": ("conflicts", cut),
    "the event of a conflict is lost": (
        "conflicts",
        lambda store: run_steps(
            store, Delete(EVENTS, [key for key in memory_store.events_of(store) if "m00003" in key])
        ),
    ),
    "a choice is reversed": ("choices", flip),
    "a choice is lost": ("choices", clear(CHOICES)),
    "a record is lost": ("choices", clear(HISTORY)),
}


#: What is repaired: users also with their links.
REPAIRED = ("users", "visitors", "groups", "links")


@pytest.mark.parametrize("name", DAMAGE)
async def test_damage_is_found(name: str) -> None:
    store = made()
    await small(store)
    healthy(await verified(store))
    what, damage = DAMAGE[name]
    damage(store)
    report = await verified(store)
    assert what in report.different, (report.different, report.differences)


@pytest.mark.parametrize(
    "name",
    [name for name, (what, _) in DAMAGE.items() if what in REPAIRED and "event that" not in name],
)
async def test_damage_of_people_is_repaired(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engage.verify.run._STEP", 2)
    store = made()
    await small(store)
    before = await everything(store)
    DAMAGE[name][1](store)
    report = await verified(store, repair=True)
    assert report.repaired.total() == 1
    healthy(await verified(store))
    assert await everything(store) == before


async def test_what_is_older_than_all_events_is_not_deleted() -> None:
    """Its event may have expired when the config said so."""
    store = made()
    await small(store)
    put = Put(TRAITS, [(*ANN, "old", 5, b"1", "m", "api", 4)])
    run_steps(store, put, Put(PROFILES, [Profile("acme", USER, "eve", 1, 1).row]))
    edit(store, LINKS, *ANN, "a-1", decided_at=5, undone=1)
    before = await store.linked_to("acme", "ann"), await store.profile("acme", "eve")
    report = await verified(store, repair=True)
    assert {"users": 2, "links": 1}.items() <= report.different.items()
    profile = await store.profile("acme", "ann")
    assert profile is not None
    assert profile.traits["old"] == 1
    # Nor is the decision of an operator.
    assert (await store.linked_to("acme", "ann"), await store.profile("acme", "eve")) == before


async def test_a_value_of_a_lost_event_is_kept_if_the_loss_is_known() -> None:
    store = made()
    await small(store)
    replace(store, body=b"{")
    edit(store, TRAITS, *ANN, "plan", value=b'"free"')
    report = await verified(store, repair=True)
    assert report.different == {"events": 1, "users": 1, "links": 1}
    assert not report.repaired


class Unseen(testing.MemoryStore):
    """A store that cannot look at its keys."""

    async def problems(self) -> Any:
        yield StoreProblem(what="keys", message="not now", doubt="unknown")


async def test_nothing_is_repaired_if_events_may_be_missing() -> None:
    store = Unseen()
    await small(store)
    edit(store, TRAITS, *ANN, "plan", value=b'"free"')
    report = await verified(store, repair=True)
    assert (report.different, report.repaired) == ({"users": 1}, {})


async def test_the_repair_of_a_sound_store_changes_nothing() -> None:
    store = made()
    await fill(store)
    tables = [PROFILES, TRAITS, MEMBERSHIPS, LINKS, CHOICES]
    before = [store.stored.tables.rows(table) for table in tables]
    report = await verified(store, repair=True)
    assert not report.repaired
    assert [store.stored.tables.rows(table) for table in tables] == before


async def test_a_repair_keeps_what_was_written_since() -> None:
    store = made()
    await small(store)
    later = (*ANN, "plan", TIME + 10**6, b'"max"', "later", "api", 10)
    run_steps(store, Put(TRAITS, [later]))
    wrong = Wrong({"plan": (TIME, "i", "api")}, {}, {}, (1, 1), (2, 2))
    await store.rebuild(ANN, wrong, [("acme", "api", "i"), ("acme", "api", "unknown")])
    assert later in store.stored.tables.rows(TRAITS)
    profile = await store.profile("acme", "ann")
    assert profile.created_at == TIME


class Late(testing.MemoryStore):
    """A store to which an event is written between a verification and the repair."""

    async def rebuild(self, *arguments: Any) -> None:
        traits = {"plan": "max"}
        await self.write(
            [full("late", type="identify", user_id="ann", traits=traits, at=now() - TIME)]
        )
        await super().rebuild(*arguments)


async def test_an_event_that_arrives_during_a_repair_counts() -> None:
    store = Late()
    await small(store)
    made_up = (*ANN, "plan", now() + 10**6, b'"free"', "m", "api", 10)
    run_steps(store, Put(TRAITS, [made_up]))
    assert (await verified(store, repair=True)).repaired == {"users": 1}
    profile = await store.profile("acme", "ann")
    assert profile is not None
    assert profile.traits["plan"] == "max"


async def test_ten_differences_are_kept_and_all_are_counted() -> None:
    store = made()
    await store.write([full(f"i{n}", type="identify", user_id=f"u{n}") for n in range(30)])
    for n in range(30):
        lose(store, ("acme", USER, f"u{n}"))
    report = await verified(store)
    assert (report.different["users"], len(report.differences)) == (30, 10)


# --------------------------------------------------------------------------------------- unprovable
async def test_users_at_a_limit_are_unprovable() -> None:
    store = made(traits=2, memberships=1, links=1)
    for n, name in enumerate("abc"):
        await store.write([full(f"t{n}", type="identify", user_id="u", traits={name: n}, at=n)])
        await store.write([full(f"g{n}", type="group", user_id="g", groupId=name, at=n)])
        await store.write([full(f"l{n}", user_id="l", anonymous_id=name, at=n)])
    report = await verified(store)
    healthy(report)
    assert reasons(report) == {("users", "at a limit"), ("links", "at a limit")}


async def test_a_workspace_without_room_for_visitors_is_unprovable() -> None:
    store = made(visitors=2)
    events = [full(f"v{n}", type="identify", anonymous_id=f"v{n}", at=n) for n in range(4)]
    await store.write(events)
    report = await verified(store)
    healthy(report)
    assert report.unprovable == {("visitors", "at a limit"): 2}


async def test_what_visitors_that_gave_way_lack_is_unprovable() -> None:
    """One is made again, one is linked later, and there are fewer by now than there may be."""
    store = made(visitors=2)
    traits = {"n": 1, "email": "a@b.c"}
    events = [full(f"v{n}", type="identify", anonymous_id=f"v{n}", traits=traits) for n in range(5)]
    for event in events:
        await store.write([event])
    await store.write(
        [
            full("again", type="identify", anonymous_id="v0", traits={"m": 1}, at=5),
            full("u", type="identify", user_id="u", anonymous_id="v1", at=5),
        ]
    )
    assert await store.expire_visitors(TIME + 1, limit=10) == 1
    report = await verified(store)
    healthy(report)
    assert report.unprovable == {("visitors", "at a limit"): 5}
    # With more room, none can have given way.
    context = store.context
    for most, different in ((5, {}), (6, {"visitors": 5})):
        limits = dataclasses.replace(context.profile_limits, visitors=most)
        report = await verified(store, context=dataclasses.replace(context, profile_limits=limits))
        assert report.different == different


@pytest.mark.parametrize("seed", range(12))
async def test_what_expired_events_made_is_unprovable(seed: int) -> None:
    store = made()
    await fill(store, seed=seed, changes=0)
    await store.expire(TIME + 1500, limit=10_000)
    await store.expire_dead_letters(1 << 60, limit=10_000)
    for step in (60, 3600, 86400):
        await store.expire_counts(step, 1 << 60, limit=10_000)
    days = (time.time_ns() // 1_000_000 - TIME) // DAY + 1
    context = dataclasses.replace(store.context, events_days=days)
    report = await verified(store, context=context)
    healthy(report)
    assert "made by events that expired" in {why for _, why in reasons(report)}
    # Without retention, the same store has lost events.
    assert (await verified(store)).different


async def test_what_no_expired_event_can_have_made_is_different() -> None:
    store = made()
    await store.write(
        [
            full("old", type="identify", user_id="u", traits={"a": 1}),
            full("new", type="identify", user_id="u", traits={"b": 1}, at=5000),
        ]
    )
    await store.expire(TIME + 1, limit=10)
    days = (time.time_ns() // 1_000_000 - TIME) // DAY + 1
    context = dataclasses.replace(store.context, events_days=days)
    report = await verified(store, context=context)
    healthy(report)
    assert report.unprovable == {("users", "made by events that expired"): 1}
    row = ("acme", USER, "u", "b", TIME + 6000, b"2", "m", "api", 4)
    run_steps(store, Put(TRAITS, [row]))
    report = await verified(store, context=context, repair=True)
    assert report.different == {"users": 1}
    report = await verified(store, context=context)
    healthy(report)
    # What the expired event made is still there.
    assert report.unprovable == {("users", "made by events that expired"): 1}


async def test_a_store_of_an_earlier_version_lacks_that_what_was_certain_was_removed() -> None:
    store = made()
    await small(store)
    removed = {"type": "identify", "origin": OPERATOR_ORIGIN, "removedTraits": ["email"]}
    await store.write([full("removed", user_id="ann", at=5, **removed)])
    run_steps(store, Delete(TRAITS, [(*ANN, "engage:trusted:email")]))
    healthy(await verified(store))
    run_steps(store, Delete(TRAITS, [(*ANN, "email")]))
    assert (await verified(store)).different == {"users": 1}


async def test_visitors_that_may_have_expired_are_unprovable() -> None:
    store = made()
    await store.write([full("v", type="identify", anonymous_id="v", traits={"n": 1})])
    assert await store.expire_visitors(TIME + 1, limit=10) == 1
    await store.write([full("w", type="identify", anonymous_id="v", traits={"m": 1}, at=5)])
    report = await verified(store, visitors_days=1)
    healthy(report)
    assert report.unprovable == {("visitors", "visitors that may have expired before"): 1}
    assert (await verified(store)).different == {"visitors": 1}


async def test_the_times_of_repeated_choices_are_unprovable() -> None:
    store = made()
    change = SubscriptionChange(
        id="c",
        workspace_id="acme",
        subject=Subject(Kind.USER, "u"),
        choices={"news": True},
        at=TIME,
        how="api",
    )
    await store.apply(change)
    report = await verified(store)
    healthy(report)
    assert report.unprovable == {}
    await store.apply(dataclasses.replace(change, id="d", at=TIME + 1))
    report = await verified(store)
    healthy(report)
    assert report.unprovable == {("users", "users with subscription changes"): 1}


class Unfinished(testing.MemoryStore):
    """A store that a crash left without the changes of an event."""

    async def unfinished(self) -> Any:
        return [("acme", "ann")]

    async def problems(self) -> Any:
        yield 3
        yield StoreProblem(what="rows", message="x", doubt="unfinished")
        yield StoreProblem(what="rows", message="y", doubt="expired")


async def test_what_a_crash_cut_off_is_unprovable() -> None:
    store = Unfinished()
    await small(store)
    lose(store, ANN)
    report = await verified(store)
    assert report.different == {"rows": 1}
    assert {what for what, why in reasons(report) if "crash" in why} >= {"rows", "users"}
    assert report.checked["storage"] == 3
    expiring = dataclasses.replace(store.context, events_days=1)
    report = await verified(store, context=expiring)
    assert report.unprovable["rows", "events that expired"] == 1


# ------------------------------------------------------------------------------------------- in use
class Failing(testing.MemoryStore):
    """A store that cannot read its users."""

    async def scan_rows(self, *_: Any, **__: Any) -> Any:
        raise StorageUnavailable("the users cannot be read")


async def test_full_temporary_files_are_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    def limited(*arguments: Any, **options: Any) -> Any:
        db = connect(*arguments, **options)
        db.execute("PRAGMA max_page_count = 5")
        return db

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", limited)
    store = made()
    await fill(store)
    report = await verified(store)
    assert report.failures == ["temporary files: database or disk is full"]
    assert report.differences == []


async def test_a_store_that_fails_is_looked_at_as_far_as_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("engage.reading.scans.PAUSE", 0)
    store = Failing()
    await fill(store)
    report = await verified(store)
    assert report.failures == ["the users cannot be read"]
    assert report.checked["dead letters"] == 3


def now() -> int:
    return time.time_ns() // 1_000_000


class Busy(testing.MemoryStore):
    """A store to which events are written between any two pages, and in which events expire."""

    random = random.Random(5)
    number = 0

    async def _work(self) -> None:
        events = []
        for event in random_events(self.random, 12, users=6):
            Busy.number += 1
            fields = event.document()
            for name in ("type", "userId", "anonymousId", "messageId", "workspaceId"):
                fields.pop(name, None)
            del fields["receivedAt"], fields["timestamp"]
            at = now() - TIME
            early = self.random.choice((0, 5, 100_000_000))
            again = full(
                f"live{Busy.number}",
                type=event.type,
                user_id=event.user_id,
                anonymous_id=event.anonymous_id,
                origin=event.origin,
                at=at - early,
                received=at,
                **fields,
            )
            again.name = event.name
            events.append(again)
        await self.write(events)
        await self.apply(
            SubscriptionChange(
                id=f"live{Busy.number}",
                workspace_id="acme",
                subject=self.random.choice((user("u1"), visitor("a1"), user(f"n{Busy.number}"))),
                choices={"news": self.random.choice((True, False))},
                at=now(),
                how="api",
            )
        )
        if self.context.events_days is not None:
            await super().expire(now() - DAY, limit=3)


def between_pages(name: str) -> Any:
    async def read(self: Busy, *arguments: Any, **options: Any) -> Any:
        await self._work()
        found = await getattr(testing.MemoryStore, name)(self, *arguments, **options)
        await self._work()
        return found

    return read


for _name in ("scan", "scan_rows", "scan_links", "history"):
    setattr(Busy, _name, between_pages(_name))


@pytest.mark.parametrize("days", [None, 1])
@pytest.mark.parametrize("seed", range(12))
async def test_a_store_in_use_has_no_differences(
    seed: int, days: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of a page finds events that the reads before did not."""
    monkeypatch.setattr("engage.verify.run._STEP", 40)
    monkeypatch.setattr("engage.reading.scans.PAGE", 40)
    context = StorageContext(base_dir=Path(), identifiers=IDENTIFIERS, events_days=days)
    store = Busy(None, context)
    Busy.random = random.Random(seed)
    await fill(store, seed=seed, count=150)
    report = await verified(store)
    assert [difference for difference in report.differences if difference[0] != "conflicts"] == []


async def test_damage_is_found_in_a_store_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engage.verify.run._STEP", 40)
    store = Busy(None, StorageContext(base_dir=Path(), identifiers=IDENTIFIERS))
    await small(store)
    run_steps(store, Delete(TRAITS, [(*ANN, "plan")]))
    edit(store, TRAITS, "acme", GROUP, "crew", "size", value=b"9")
    report = await verified(store)
    assert report.different == {"users": 1, "groups": 1}
