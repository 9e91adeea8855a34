# SPDX-License-Identifier: Apache-2.0
"""Copying a store into another one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from engage.api import (
    ERASED,
    DeadLetterBudget,
    Kind,
    Page,
    StorageContext,
    StorageUnavailable,
    Subject,
    SubscriptionChange,
)
from engage.copy.copy import Counts, copy_all
from engage.reading.export import KINDS, Selection, export
from engage.store.facade import Storage
from engage.testing.factories import TIME, count, event, identify, letter, record, suppression
from support.memory_store import MemoryEvents, MemoryStore, events_of

#: The kinds in the order of a copy → how many of each :func:`fill` puts into a store.
FILLED = {
    "events": 453,
    "subscription changes": 3,
    "suppressions": 2,
    "dead letters": 3,
    "write keys": 2,
    "audit records": 1,
    "counters": 3,
    "profiles": 2,
}


def two() -> tuple[Any, Any]:
    return MemoryStore(), MemoryStore()


def change(name: str, at: int, user: str = "ann", how: str = "api", **choices: bool) -> Any:
    """Return a subscription change."""
    return SubscriptionChange(
        id=name,
        workspace_id="acme",
        subject=Subject(Kind.USER, user),
        choices=choices,
        at=TIME + at,
        how=how,
    )


async def fill(store: Any) -> None:
    """Put records of every kind into a store."""
    await store.write([event(f"m{n}", user_id=f"u{n % 7}", at=n) for n in range(450)])
    await store.write(
        [
            identify("i1", "ann", 1, traits={"plan": "pro", "z": -0.0}),
            event("g1", type="group", user_id="ann", groupId="g", traits={"a": 1}),
            event("m1", workspace="other", origin="twilio", user_id="ann", anonymous_id="x"),
        ]
    )
    await store.apply(change("c1", 1, news=True, sms=True))
    await store.apply(change("c2", 2, news=False))
    page = {"how": "page", "secret": "0a1b2c3d", "user_agent": "Mozilla", "address": "192.0.2.1"}
    third = change("c3", 3, user="bob", news=True)
    await store.apply(dataclasses.replace(third, **page))
    await store.suppress([suppression(how="webhook:resend"), suppression("x@y.z", lifted=True)])
    await store.put([letter(f"d{n}") for n in range(2)])
    await store.put([letter("d2", operation="batch", envelope=b'{"sentAt":"x"}')])
    for one in (record("k"), record("k", kind="key-override"), record("a", "", kind="audit")):
        await store.put_record(one)
    await store.put_counts([count(3), count(4, process="q"), count(5, step=3600)])


async def everything(store: Storage) -> dict[str, list[bytes]]:
    """Return everything that a store exports, in a comparable order."""
    return {
        kind: sorted([record.json async for record in export(store, kind, Selection())])
        for kind in KINDS
    }


async def history_of(store: Any) -> Any:
    return (await store.history("acme", Subject(Kind.USER, "ann"), after=None, limit=100)).items


async def run(source: Storage, target: Storage) -> dict[str, tuple[int, int, int, int]]:
    """Return (copied, duplicate, conflicting, refused) of each kind."""
    return {counts.kind: numbers(counts) async for counts in copy_all(source, target)}


def numbers(counts: Counts) -> tuple[int, int, int, int]:
    """Return (copied, duplicate, conflicting, refused)."""
    return (counts.copied, counts.duplicate, counts.conflicting, counts.refused)


@pytest.mark.parametrize("mark", [b"", ERASED + b"0123:4567"])
async def test_what_is_erased_in_the_target_stays_erased(mark: bytes) -> None:
    source, target = two()
    await fill(source)
    await run(source, target)
    gone = [event(f"m{n}", user_id=f"u{n}") for n in range(3)]
    assert await target.erase_events(gone, [mark] * 3) == 3
    assert (await run(source, target))["events"] == (0, FILLED["events"], 0, 0)
    assert len(events_of(target)) == FILLED["events"] - 3


async def test_everything_is_copied_and_a_copy_can_be_repeated() -> None:
    source, target = two()
    await fill(source)
    before = await everything(source)
    assert await run(source, target) == {kind: (total, 0, 0, 0) for kind, total in FILLED.items()}
    assert await everything(target) == before
    assert await everything(source) == before
    history = [
        (r.change_id, r.group_id, r.before, r.after, r.at, r.how) for r in await audit(target)
    ]
    assert history == [
        ("c1", "news", None, True, TIME + 1, "api"),
        ("c1", "sms", None, True, TIME + 1, "api"),
        ("c2", "news", True, False, TIME + 2, "api"),
        ("c3", "news", None, True, TIME + 3, "page"),
    ]
    written_again = ("suppressions", "counters", "profiles")
    assert await run(source, target) == {
        kind: (total, 0, 0, 0) if kind in written_again else (0, total, 0, 0)
        for kind, total in FILLED.items()
    }
    assert await everything(target) == before


async def audit(store: Any) -> list[Any]:
    """Return all audit records."""
    page = await store.history(None, None, after=None, limit=1000)
    return sorted(page.items, key=lambda record: (record.at, record.group_id))


async def test_another_event_under_the_same_id_is_a_conflict() -> None:
    source, target = two()
    await source.write([event("m1", properties={"n": 1}), event("m2")])
    await target.write([event("m1", properties={"n": 1.0}), event("m2")])
    assert (await run(source, target))["events"] == (0, 1, 1, 0)


async def test_an_interrupted_copy_can_be_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engage.copy.copy.PAGE", 200)
    source, target = two()
    await fill(source)
    write, calls = target.write, 0

    async def fails(events: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise StorageUnavailable("gone")
        return await write(events)

    target.write = fails
    with pytest.raises(StorageUnavailable):
        await run(source, target)
    counts = await run(source, target)
    assert counts["events"][0] > 0
    assert counts["events"][1] > 0
    assert await everything(target) == await everything(source)


async def test_refused_events_are_counted_with_their_reason() -> None:
    source, target = MemoryEvents(), MemoryEvents()
    await source.write([event("ok"), event("bad1"), event("bad2")])
    target.refuse = {"bad1": "it is bad", "bad2": "it is bad"}
    told: list[int] = []
    done = [counts async for counts in copy_all(source, target, lambda c: told.append(c.total))]
    events = done[0]
    assert numbers(events) == (1, 0, 0, 2)
    assert events.reasons == ["it is bad"]
    assert not events.arrived
    assert told == [3]


async def test_a_newer_choice_in_the_target_stays() -> None:
    source, target = two()
    await source.apply(change("c1", 1, news=True, sms=True))
    await target.apply(change("x", 9, news=False))
    assert (await run(source, target))["subscription changes"] == (0, 0, 1, 0)
    assert await target.state("acme", Subject(Kind.USER, "ann")) == {"news": False, "sms": True}


async def test_choices_made_in_the_target_after_a_copy_stay() -> None:
    source, target = two()
    await source.apply(change("c1", 1, news=True))
    await run(source, target)
    await target.apply(change("x", 9, news=False))
    assert (await run(source, target))["subscription changes"] == (0, 1, 0, 0)
    assert await target.state("acme", Subject(Kind.USER, "ann")) == {"news": False}


async def test_a_history_that_is_not_in_the_order_of_its_times_is_copied() -> None:
    """Requests at the same moment, and hosts whose clocks differ, write such a history."""
    source, target = two()
    for number, at in enumerate((1, 9, 5, 7, 3)):
        await source.apply(change(f"c{number}", at, news=number % 2 == 0))
    assert (await run(source, target))["subscription changes"][2:] == (0, 0)
    assert await everything(target) == await everything(source)
    # Choices in the target are newer only if the source does not have them.
    await source.apply(change("c5", 2, news=False))
    await target.apply(change("x", 99, sms=False))
    await source.apply(change("c6", 4, news=True, sms=True))
    await source.apply(change("c7", 5, news=False, sms=False))
    await run(source, target)
    assert await target.state("acme", Subject(Kind.USER, "ann")) == {"news": False, "sms": False}
    assert [one.group_id for one in (await history_of(target))[-3:]] == ["news"] * 3


async def test_a_choice_that_no_history_explains_is_copied() -> None:
    source, target = two()
    await source.apply(change("c1", 1, news=True))

    async def forgotten(*_: Any, **__: Any) -> Page[Any]:
        return Page([], None)

    source.history = forgotten
    assert (await run(source, target))["subscription changes"] == (1, 0, 0, 0)
    assert await target.state("acme", Subject(Kind.USER, "ann")) == {"news": True}


async def test_a_profile_that_no_event_explains_is_reported() -> None:
    source, target = two()
    await source.write([identify("i", "ann", 1, traits={"a": 1}), identify("j", "ann", 2)])
    assert await source.expire(TIME + 2, limit=10) == 1
    counts = {counts.kind: counts async for counts in copy_all(source, target)}
    assert numbers(counts["profiles"]) == (0, 0, 1, 0)
    assert counts["profiles"].reasons == [
        "a profile differs: some of its events have expired, or new ones have arrived"
    ]


async def test_a_profile_may_have_more_in_the_target() -> None:
    source, target = two()
    await source.write([identify("i", "ann", 1, traits={"a": 1})])
    await target.write([identify("j", "ann", 2, traits={"a": 2, "b": 1})])
    assert (await run(source, target))["profiles"] == (1, 0, 0, 0)


async def test_dead_letters_beyond_the_budget_are_refused(tmp_path: Path) -> None:
    budget = DeadLetterBudget(api_count=2)
    context = StorageContext(base_dir=tmp_path, identifiers={}, dead_letter_budget=budget)
    source, target = MemoryStore(), MemoryStore(None, context)
    await source.put([letter(f"d{n}") for n in range(3)])
    assert (await run(source, target))["dead letters"] == (2, 0, 0, 1)
