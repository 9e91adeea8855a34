# SPDX-License-Identifier: Apache-2.0
"""Protected traits in a whole server: profiles, claims, dead letters, replays, the log."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import orjson

from engage.audit import Actor
from engage.keys.changes import create_key
from support.memory_log import MemoryBroker
from support.server_inprocess import BASIC, Serving, basic, serving

SECRET = "5e" * 16
WORKSPACE = 'protected_traits = ["plan", "email"]'
SERVER_KEY = f"""
[[workspaces.write_keys]]
id = "backend"
kind = "server"
sha256 = "{hashlib.sha256(SECRET.encode()).hexdigest()}"
"""
ITEM = {"type": "identify", "userId": "u", "traits": {"plan": "pro", "email": "a@b.co", "a": 1}}


async def traits_of(server: Serving, user_id: str = "u") -> dict[str, Any]:
    profile = await server.app.store.profile("acme", user_id)
    assert profile is not None
    return dict(profile.traits)


async def test_a_public_key_cannot_overwrite_them(tmp_path: Path) -> None:
    """Nor claim an address, also as a visitor who becomes the user."""
    async with serving(tmp_path, workspace=WORKSPACE, config_extra=SERVER_KEY) as server:
        trusted = basic(f"{SECRET}:")
        assert (await server.send("/v1/identify", ITEM, key=trusted)).status == 200
        for body in (
            {"userId": "u", "traits": {"plan": "free", "email": "x@y.zz", "a": 2}},
            {"anonymousId": "v", "traits": {"plan": "free", "email": "x@y.zz", "b": 3}},
            {"userId": "u", "anonymousId": "v", "context": {"traits": {"plan": "free"}}},
        ):
            assert (await server.send("/v1/identify", body, key=BASIC)).status == 200
        assert await traits_of(server) == {"plan": "pro", "email": "a@b.co", "a": 2, "b": 3}
        users = await server.app.store.find_users("acme", "email", ["x@y.zz", "a@b.co"])
        assert users == {"a@b.co": ["u"]}


async def test_a_replay_obeys_the_kind_of_the_key_of_the_letter(tmp_path: Path) -> None:
    async with serving(tmp_path, workspace=WORKSPACE, config_extra=SERVER_KEY) as server:
        store = server.app.store
        made = await create_key(
            store,
            server.app.config.workspaces,
            "acme",
            "jobs",
            options={"kind": "server"},
            actor=Actor(who="ann", origin="test"),
            now=1_795_253_400_000,
        )
        keys = {"website": BASIC, "backend": basic(f"{SECRET}:"), "jobs": basic(f"{made.key}:")}
        for key_id, key in keys.items():
            broken = {**ITEM, "userId": key_id, "timestamp": "never"}
            assert (await server.send("/v1/batch", {"batch": [broken]}, key=key)).status == 200
        letters = {letter.write_key_id or "": letter for letter in await server.dead_letters()}
        assert letters.keys() == keys.keys()
        for key_id, letter in letters.items():
            text = orjson.dumps({**ITEM, "userId": key_id, "context": {"engage": {"x": 1}}})
            explained = await server.app.replays.check(letter, text)
            replayed = await server.app.replays.replay(letter, text)
            assert replayed.outcome == "stored", replayed
            assert explained.event is not None
            mark = explained.event.document()["context"]["engage"]
            assert mark.pop("replayOf") == letter.id
            kept = await traits_of(server, key_id)
            if key_id == "website":
                assert (kept, mark) == ({"a": 1}, {"droppedTraits": ["email", "plan"]})
            else:
                assert (kept, mark) == (ITEM["traits"], {"trusted": ["email"]})
        assert await server.dead_letters() == []


async def test_the_replay_of_a_conflict_keeps_what_was_removed(tmp_path: Path) -> None:
    async with serving(tmp_path, workspace=WORKSPACE, config_extra=SERVER_KEY) as server:
        for number in (1, 2):
            body = {**ITEM, "messageId": "m", "traits": {"plan": "x", "a": number}}
            assert (await server.send("/v1/identify", body)).status == 200
        (letter,) = await server.dead_letters()
        assert b"droppedTraits" in letter.item
        assert (await server.app.replays.replay(letter, new_id=True)).outcome == "stored"
        event = (await server.events())[-1].document()
        assert event["context"]["engage"] == {"droppedTraits": ["plan"], "replayOf": letter.id}
        assert await traits_of(server) == {"a": 2}


async def test_they_are_removed_in_front_of_a_log(tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with serving(
        tmp_path, workspace=WORKSPACE, config_extra=SERVER_KEY, broker=broker
    ) as server:
        assert (await server.send("/v1/identify", ITEM)).status == 200
        (value,) = (read.record.value for read in broker.records)
    assert b'"droppedTraits":["email","plan"]' in value
    assert b"a@b.co" not in value
