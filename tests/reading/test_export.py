# SPDX-License-Identifier: Apache-2.0
"""Exporting the records of a store as documents."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, cast

import pytest

from engage.api import (
    Kind,
    Page,
    StorageUnavailable,
    Subject,
    SubscriptionChange,
)
from engage.reading.export import RecordKind, Selection, export
from engage.reading.scans import ATTEMPTS, MAX_PAGE, PAGE, all_pages
from engage.store.facade import Storage
from engage.testing.factories import TIME, event, identify, letter, suppression
from engage.testing.memory_store import MemoryStore


async def lines(store: Storage, kind: RecordKind, **selection: Any) -> list[dict[str, Any]]:
    """Return the exported documents."""
    return [json.loads(record.json) async for record in export(store, kind, Selection(**selection))]


async def filled() -> MemoryStore:
    """Return a store with records of every kind."""
    store = MemoryStore()
    await store.write(
        [
            identify("m1", "ann", 1, traits={"plan": "pro", "b": None, "a": [1, {"z": 0}]}),
            event("m2", user_id="ann", anonymous_id="anon-2", at=2),
            event("m3", user_id="ann", anonymous_id="anon-1", at=3),
            event("m4", type="group", user_id="ann", groupId="g2", at=4, traits={"size": 2}),
            event("m5", type="group", user_id="ann", groupId="g1", at=5),
            identify("m6", "bob", 6, workspace="other"),
        ]
    )
    change = SubscriptionChange(
        id="c1",
        workspace_id="acme",
        subject=Subject(Kind.USER, "ann"),
        choices={"news": True},
        at=TIME,
        how="api",
    )
    await store.apply(change)
    await store.put(
        [
            letter("d1", user_id="ann"),
            letter(
                "d2",
                workspace_id="other",
                origin="twilio",
                item=b"\xff\x00",
                truncated=True,
                headers=[("A", "1"), ("A", "2")],
                received_at=TIME + 5,
            ),
        ]
    )
    return store


async def test_events_are_exported() -> None:
    store = await filled()
    everything = await lines(store, "events")
    assert [line["messageId"] for line in everything] == ["m1", "m2", "m3", "m4", "m5", "m6"]
    assert everything[0]["traits"] == {"plan": "pro", "b": None, "a": [1, {"z": 0}]}

    async def chosen(**selection: Any) -> list[str]:
        return [line["messageId"] for line in await lines(store, "events", **selection)]

    assert await chosen(workspace="other") == ["m6"]
    assert await chosen(since=TIME + 5) == ["m5", "m6"]
    assert await chosen(type="track") == ["m2", "m3"]
    assert await chosen(user="bob") == ["m6"]


async def test_keys_are_sorted_whatever_the_storage() -> None:
    store = MemoryStore()
    await store.write([event("m", user_id="u", properties={"b": 1, "a": {"d": 1, "c": 2}})])
    (line,) = [record.json async for record in export(store, "events", Selection())]
    assert line == (
        b'{"event":"Clicked","messageId":"m","properties":{"a":{"c":2,"d":1},"b":1},'
        b'"type":"track","userId":"u","workspaceId":"acme"}'
    )


async def test_a_record_is_one_line_to_any_reader() -> None:
    text = "a\x85b\u2028c\u2029d\n\r\x0b\x0c\x1c\x1d\x1e"
    store = MemoryStore()
    await store.write([event("m", user_id=text)])
    (record,) = [record async for record in export(store, "events", Selection())]
    assert len(record.json.decode().splitlines()) == 1
    assert json.loads(record.json)["userId"] == text


async def test_users_are_exported() -> None:
    store = await filled()
    ann = {
        "workspaceId": "acme",
        "userId": "ann",
        "traits": {"plan": "pro", "b": None, "a": [1, {"z": 0}]},
        "createdAt": "2025-01-01T00:00:00.000Z",
        "updatedAt": "2025-01-01T00:00:00.005Z",
        "anonymousIds": ["anon-1", "anon-2"],
        "groups": ["g1", "g2"],
    }
    everything = await lines(store, "users")
    assert sorted(line["userId"] for line in everything) == ["ann", "bob"]
    assert await lines(store, "users", workspace="acme") == [ann]
    assert await lines(store, "users", user="ann") == [ann]
    assert await lines(store, "users", workspace="acme", user="ann") == [ann]
    assert await lines(store, "users", workspace="acme", user="ann", since=TIME + 6) == []
    assert await lines(store, "users", workspace="acme", user="bob") == []
    assert [line["userId"] for line in await lines(store, "users", since=TIME + 6)] == ["bob"]


async def test_groups_are_exported() -> None:
    store = await filled()
    everything = await lines(store, "groups")
    assert sorted(everything, key=lambda line: line["groupId"]) == [
        {"workspaceId": "acme", "groupId": "g1", "traits": {}},
        {"workspaceId": "acme", "groupId": "g2", "traits": {"size": 2}},
    ]
    assert await lines(store, "groups", workspace="other") == []


async def test_the_history_of_a_user_is_exported_since_a_time() -> None:
    store = await filled()
    made = {
        "id": "c2",
        "how": "one-click",
        "secret": "0a1b2c3d",
        "user_agent": "Mozilla",
        "address": "::1",
    }
    for user, at, fields in (("ann", 5, made), ("bob", 6, {"id": "c3", "how": "api"})):
        one = {"workspace_id": "acme", "choices": {"news": False}, "at": TIME + at, **fields}
        await store.apply(SubscriptionChange(subject=Subject(Kind.USER, user), **one))  # type: ignore[arg-type]
    second = {
        "workspaceId": "acme",
        "userId": "ann",
        "anonymousId": None,
        "groupId": "news",
        "changeId": "c2",
        "at": "2025-01-01T00:00:00.005Z",
        "how": "one-click",
        "before": True,
        "after": False,
        "secret": "0a1b2c3d",
        "userAgent": "Mozilla",
        "address": "::1",
    }
    assert await lines(store, "subscription-history", user="ann", since=TIME + 1) == [second]

    async def chosen(**selection: Any) -> list[str]:
        found = await lines(store, "subscription-history", **selection)
        return [line["changeId"] for line in found]

    assert await chosen() == ["c1", "c2", "c3"]
    assert await chosen(user="ann", workspace="acme") == ["c1", "c2"]
    assert await chosen(since=TIME + 6) == ["c3"]
    assert await chosen(workspace="other") == []


async def test_suppressions_are_exported() -> None:
    store = await filled()
    await store.suppress([suppression(how="webhook:resend", source_id="e"), suppression("x", at=5)])
    (one,) = await lines(store, "suppressions", workspace="acme", since=TIME + 5)
    assert (one["address"], one["at"]) == ("x", "2025-01-01T00:00:00.005Z")
    assert (await lines(store, "suppressions"))[0] == {
        "workspaceId": "acme",
        "channel": "email",
        "address": "a@b.c",
        "groupId": "",
        "reason": "complaint",
        "at": "2025-01-01T00:00:00.000Z",
        "lifted": False,
        "how": "webhook:resend",
        "sourceId": "e",
    }


async def test_subscriptions_are_exported() -> None:
    store = await filled()
    line = {
        "workspaceId": "acme",
        "userId": "ann",
        "anonymousId": None,
        "groupId": "news",
        "subscribed": True,
        "updatedAt": "2025-01-01T00:00:00.000Z",
    }
    assert await lines(store, "subscriptions") == [line]
    assert await lines(store, "subscriptions", user="ann", workspace="acme") == [line]
    for other in ({"user": "bob"}, {"workspace": "other"}, {"since": TIME + 1}):
        assert await lines(store, "subscriptions", **other) == []
    # The choice of a visitor of hers is its own, in a row that says so.
    await store.write([event("v", type="identify", anonymous_id="anon-1")])
    await store.apply(
        SubscriptionChange(
            id="c2",
            workspace_id="acme",
            subject=Subject(Kind.VISITOR, "anon-1"),
            choices={"news": False},
            at=TIME + 7,
            how="api",
        )
    )
    later = {"subscribed": False, "updatedAt": "2025-01-01T00:00:00.007Z"}
    of_visitor = line | later | {"userId": None, "anonymousId": "anon-1"}
    assert await lines(store, "subscriptions", user="ann") == [line]
    assert await lines(store, "subscriptions", since=TIME + 7) == [of_visitor]
    (record,) = await lines(store, "subscription-history", since=TIME + 7)
    assert (record["userId"], record["anonymousId"]) == (None, "anon-1")


async def test_dead_letters_are_exported() -> None:
    store = await filled()
    first, second = await lines(store, "dead-letters")
    assert first == {
        "workspaceId": "acme",
        "id": "d1",
        "receivedAt": "2025-01-01T00:00:00.000Z",
        "origin": "api",
        "writeKeyId": "website",
        "userId": "ann",
        "anonymousId": "visitor",
        "messageId": "m",
        "reason": "invalid_payload",
        "message": "userId: too long",
        "errors": [{"pointer": "/userId", "message": "too long"}],
        "item": '{"userId": 1}',
        "truncated": False,
        "headers": [],
    }
    assert second["itemBase64"] == "/wA="
    assert "item" not in second
    assert second["headers"] == [["A", "1"], ["A", "2"]]
    assert second["truncated"] is True
    assert await lines(store, "dead-letters", workspace="acme") == [first]
    assert await lines(store, "dead-letters", user="ann") == [first]
    assert await lines(store, "dead-letters", since=TIME + 5) == [second]


async def test_all_pages_are_read() -> None:
    pages = {None: Page([1, 2], "a"), "a": Page([], "b"), "b": Page([3], "c"), "c": Page([], None)}

    async def read(*, after: str | None, limit: int) -> Page[int]:
        assert limit > 0
        return pages[after]

    assert [item async for item in all_pages(read)] == [1, 2, 3]
    assert [item async for item in all_pages(read, "a")] == [3]


class Numbers:
    """A scan of the numbers below 20 000 in a store that does not answer now and then.

    :param fails: returns whether it answers a call: its number, the place and the limit.
    """

    def __init__(self, fails: Callable[[int, int, int], bool]) -> None:
        self._fails = fails
        self.limits: list[int] = []

    async def read(self, *, after: str | None, limit: int) -> Page[int]:
        start = int(after or 0)
        self.limits.append(limit)
        if self._fails(len(self.limits), start, limit):
            raise StorageUnavailable("busy")
        end = min(start + limit, 20_000)
        return Page(range(start, end), str(end) if end < 20_000 else None)


async def test_pages_grow_and_never_beyond_the_largest() -> None:
    numbers = Numbers(lambda *_: False)
    assert [n async for n in all_pages(numbers.read)] == list(range(20_000))
    assert numbers.limits[:5] == [PAGE, 2 * PAGE, 4 * PAGE, 8 * PAGE, MAX_PAGE]
    assert max(numbers.limits) == MAX_PAGE


@pytest.mark.virtual_time
async def test_a_page_that_fails_is_read_again_in_smaller_parts() -> None:
    too_large = Numbers(lambda _, start, limit: start > 5_000 and limit > 700)
    assert [n async for n in all_pages(too_large.read)] == list(range(20_000))
    now_and_then = Numbers(lambda call, *_: call % 3 == 0)
    assert [n async for n in all_pages(now_and_then.read)] == list(range(20_000))


@pytest.mark.virtual_time
async def test_a_scan_that_is_interrupted_can_be_continued_without_a_gap() -> None:
    down = Numbers(lambda _, start, __: start >= 5_000)
    seen = []
    scan = all_pages(down.read)

    async def read_on() -> None:
        async for number in scan:
            seen.append(number)  # noqa: PERF401 - those before the error are wanted

    with pytest.raises(StorageUnavailable, match=r"busy; read up to \d+\Z") as caught:
        await read_on()
    rest = [
        n
        async for n in all_pages(
            Numbers(lambda *_: False).read, str(caught.value).rpartition(" ")[2]
        )
    ]
    assert [*seen, *rest] == list(range(20_000))
    first = Numbers(lambda *_: True)
    with pytest.raises(StorageUnavailable, match=r"\Abusy\Z"):
        [n async for n in all_pages(first.read)]
    assert len(first.limits) == ATTEMPTS


def deep(levels: int) -> bytes:
    return b'{"a":' * (levels - 1) + b"{}" + b"}" * (levels - 1)


async def test_a_record_that_cannot_be_a_line_is_left_out_and_named() -> None:
    store = MemoryStore()
    odd: dict[str, bytes] = {"deep": deep(900), "broken": b"[", "text": b"\xff"}
    events = [dataclasses.replace(event(name), body=body) for name, body in odd.items()]
    await store.write([event("first"), *events, event("last")])
    await store.put(
        [
            letter("l1"),
            letter("l2", received_at=9 * 10**15),
            letter("l3"),
        ]
    )
    for kind, good, bad in (
        ("events", ["first", "last"], list(odd)),
        ("dead-letters", ["l1", "l3"], ["l2"]),
    ):
        problems: list[str] = []
        name = "messageId" if kind == "events" else "id"
        made = export(store, cast("RecordKind", kind), Selection(), problems.append)
        assert [json.loads(record.json)[name] async for record in made] == good
        for problem, named in zip(problems, bad, strict=True):
            assert f" {named}," in problem or f" {named}:" in problem
    with pytest.raises(TypeError):
        await lines(store, "events")
