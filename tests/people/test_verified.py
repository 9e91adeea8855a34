# SPDX-License-Identifier: Apache-2.0
"""A store from which people were erased is verified: nothing differs, and damage is found."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engage.api import DAY_MS, Kind, StorageUnavailable, SubscriptionChange
from engage.config import erasures_file as erasures
from engage.people.addresses import named_addresses
from engage.people.erase import erase_user
from engage.people.tombstones import put_tombstones
from engage.testing import MemoryStore
from engage.testing.factories import TIME, letter, suppression, user, visitor
from engage.verify import Report
from support.people import ACTOR, KEY, config, on_each
from support.verifying import context_of, fill, full, healthy, small, verified


async def erased(store: Any, folder: Path, *users: str) -> None:
    for name in users:
        visitors = ["a-1"] if name == "ann" else []
        named: Any = {"visitors": visitors, "addresses": named_addresses(["a@b.c", "+4912345"])}
        await erase_user(store, config(folder), "acme", name, actor=ACTOR, **named)


async def report_of(store: Any) -> Report:
    return await verified(store, erasures_key=KEY)


async def fill_person(store: Any) -> None:
    """Fill a store in which ``ann`` has everything that an erasure deletes."""
    await small(store)
    choice: dict[str, Any] = {"workspace_id": "acme", "choices": {"news": True}, "how": "api"}
    for subject in (user("ann"), visitor("a-1")):
        await store.apply(
            SubscriptionChange(
                id=f"ann{subject.kind}", subject=subject, at=TIME + 900_000, **choice
            )
        )
    await store.keep(
        [letter("of-ann", user_id="ann"), letter("of-a-1", user_id=None, anonymous_id="a-1")]
    )
    await store.suppress([suppression("a@b.c"), suppression("+4912345", channel="sms")])
    await store.write([full("later", user_id="u1", anonymous_id="a-1", at=900_001)])


@on_each
async def test_an_erased_person_makes_no_difference(store: Any, tmp_path: Path) -> None:
    await fill_person(store)
    healthy(await report_of(store))
    await erased(store, tmp_path, "ann")
    report = await report_of(store)
    healthy(report)
    assert report.unprovable["groups", "made by events that were erased"] == 1
    # What the person does later makes a new user.
    await store.write(
        [
            full("new", type="identify", user_id="ann", traits={"n": 1}, at=2**40),
            full("seen-again", user_id="ann", anonymous_id="a-1", at=2**40),
        ]
    )
    report = await report_of(store)
    healthy(report)
    await erased(store, tmp_path, "u1", "u2", "nobody")
    healthy(await report_of(store))


@on_each
async def test_erased_people_make_no_difference(store: Any, tmp_path: Path) -> None:
    await fill(store, count=150)
    for number in range(0, 20, 3):
        await erased(store, tmp_path, f"u{number}")
    report = await report_of(store)
    healthy(report)
    assert report.checked["users"] > 10


@on_each
async def test_what_should_be_erased_is_found(store: Any, tmp_path: Path) -> None:
    await fill_person(store)
    await erased(store, tmp_path, "ann")
    # As if a copy of the store from before brought them back.
    await store.write(
        [
            full("back", type="identify", user_id="ann", traits={"n": 1}, at=2**40),
            full("of-visitor", anonymous_id="a-1", at=2**40),
        ]
    )
    noted, _ = erasures.read(erasures.erasures_path(config(tmp_path)), KEY)
    later = [dataclasses.replace(one, at=TIME + 2**40 + 1) for one in noted]
    await put_tombstones(store, later, done=True)
    report = await report_of(store)
    assert report.different == {"events": 2}
    assert report.differences[0][1].endswith("is of an erased person")


@on_each
async def test_a_difference_without_an_erased_person_is_found(store: Any, tmp_path: Path) -> None:
    await fill_person(store)
    await erased(store, tmp_path, "ann")
    events = [full("x", type="identify", user_id="zoe", traits={"n": 1})]
    await store.write(events)
    # Its changes stay.
    await store.erase_events(events, [b""])
    report = await report_of(store)
    assert report.different == {"users": 1}
    assert "'zoe'" in report.differences[0][1]


@on_each
async def test_the_oldest_event_is_found_behind_erased_ones(store: Any, tmp_path: Path) -> None:
    """What is newer than it cannot have expired."""
    events = [
        full("first", user_id="eve"),
        full("second", user_id="bob", at=1),
        full("third", type="identify", user_id="zoe", traits={"n": 1}, at=5000),
    ]
    await store.write(events)
    await erased(store, tmp_path, "eve")
    # Its changes stay.
    await store.erase_events(events[2:], [b""])
    days = (time.time_ns() // 1_000_000 - TIME) // DAY_MS + 1
    context = dataclasses.replace(context_of(store), events_days=days)
    report = await verified(store, erasures_key=KEY, context=context)
    assert report.different == {"users": 1}
    assert "'zoe'" in report.differences[0][1]


@on_each
async def test_half_an_erasure_is_unprovable(store: Any, tmp_path: Path) -> None:
    await fill_person(store)
    method = store.erase_profile
    for failing in (Kind.VISITOR, Kind.USER):

        async def fail(workspace: str, kind: Kind, name: str, failing: Kind = failing) -> bool:
            if kind is failing:
                raise StorageUnavailable("the disk is full")
            done: bool = await method(workspace, kind, name)
            return done

        store.erase_profile = fail
        with pytest.raises(StorageUnavailable):
            await erased(store, tmp_path, "ann")
        report = await report_of(store)
        healthy(report)
        # MongoDB says that the events are being written.
        assert f"{failing}s" in {what for (what, _), count in report.unprovable.items() if count}
    store.erase_profile = method
    await erased(store, tmp_path, "ann")
    report = await report_of(store)
    healthy(report)
    assert not any("meanwhile" in why for _, why in report.unprovable)


class Erasing(MemoryStore):
    """A store from which a user is erased after some pages."""

    after_page: Callable[[], Awaitable[None]] | None = None


def _then_erase(name: str) -> Any:
    async def read(self: Erasing, *arguments: Any, **options: Any) -> Any:
        found = await getattr(MemoryStore, name)(self, *arguments, **options)
        if self.after_page is not None:
            await self.after_page()
        return found

    return read


for _name in ("scan_rows", "scan_links"):
    setattr(Erasing, _name, _then_erase(_name))


@pytest.mark.parametrize("seed", range(6))
async def test_an_erasure_meanwhile_makes_no_difference(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engage.verify.run._STEP", 40)
    monkeypatch.setattr("engage.reading.scans.PAGE", 40)
    store, random_ = Erasing(), random.Random(seed)
    await fill(store, seed=seed, count=300)

    async def erase_some() -> None:
        # An erasure reads pages, which must not begin another one.
        after_page, store.after_page = store.after_page, None
        if random_.random() < 0.3:
            await erased(store, tmp_path, f"u{random_.randrange(20)}")
        store.after_page = after_page

    store.after_page = erase_some
    healthy(await report_of(store))
