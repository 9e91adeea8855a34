# SPDX-License-Identifier: Apache-2.0
"""Exporting the records of a store as documents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engage.api import EngageError, EventStore, Page, SubscriptionChange
from engage.testing.factories import TIME, event, identify, letter
from engage.testing.memory_store import MemoryEvents, MemoryStore
from engage.upkeep.export import KINDS, Kind, Selection, all_pages, export


async def lines(store: EventStore, kind: Kind, **selection: Any) -> list[dict[str, Any]]:
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
        id="c1", workspace_id="acme", user_id="ann", choices={"news": True}, at=TIME, how="api"
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
    store = MemoryEvents()
    await store.write([event("m", user_id="u", properties={"b": 1, "a": {"d": 1, "c": 2}})])
    (line,) = [record.json async for record in export(store, "events", Selection())]
    assert line == (
        b'{"event":"Clicked","messageId":"m","properties":{"a":{"c":2,"d":1},"b":1},'
        b'"type":"track","userId":"u","workspaceId":"acme"}'
    )


async def test_a_record_is_one_line_to_any_reader() -> None:
    text = "a\x85b\u2028c\u2029d\n\r\x0b\x0c\x1c\x1d\x1e"
    store = MemoryEvents()
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


async def test_subscriptions_are_exported() -> None:
    store = await filled()
    line = {
        "workspaceId": "acme",
        "userId": "ann",
        "groupId": "news",
        "subscribed": True,
        "updatedAt": "2025-01-01T00:00:00.000Z",
    }
    assert await lines(store, "subscriptions") == [line]
    assert await lines(store, "subscriptions", user="ann", workspace="acme") == [line]
    for other in ({"user": "bob"}, {"workspace": "other"}, {"since": TIME + 1}):
        assert await lines(store, "subscriptions", **other) == []


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


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"events"}))
async def test_a_kind_that_the_storage_lacks_is_an_error(kind: Kind) -> None:
    with pytest.raises(EngageError, match="the configured storage does not store "):
        await lines(MemoryEvents(), kind)


async def test_all_pages_are_read() -> None:
    pages = {None: Page([1, 2], "a"), "a": Page([], "b"), "b": Page([3], "c"), "c": Page([], None)}

    async def read(after: str | None) -> Page[int]:
        return pages[after]

    assert [item async for item in all_pages(read)] == [1, 2, 3]
