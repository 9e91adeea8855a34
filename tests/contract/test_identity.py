# SPDX-License-Identifier: Apache-2.0
"""Identity verification in a whole server: public keys send a hash of the user id."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from engage.log.letters import letter_of_event
from engage.monitoring.metrics import Metrics
from engage.pipeline.dead_letters import Conflict
from support.http_errors import check_error
from support.identity import REQUIRED, SECRET, hash_of
from support.memory_log import MemoryBroker
from support.server_inprocess import BASIC, Serving, basic, serving

OLDER = "an older secret of acme"
TWO = REQUIRED.replace(f'"{SECRET}"', f'["{SECRET}", "{OLDER}"]')
SERVER_KEY = "5e" * 16
OTHERS = f"""
[[workspaces.write_keys]]
id = "backend"
kind = "server"
sha256 = "{hashlib.sha256(SERVER_KEY.encode()).hexdigest()}"

[[workspaces]]
id = "other"
verify_identity = "required"
identity_secret = "the secret of other"
[[workspaces.write_keys]]
id = "app"
key = "key-of-other"
"""
CODE = "identity_not_verified"
ROUTES: dict[str, dict[str, Any]] = {
    "identify": {"traits": {"plan": "pro"}},
    "track": {"event": "E"},
    "page": {},
    "screen": {},
    "group": {"groupId": "g", "traits": {"size": 1}},
    "alias": {"previousId": "p"},
}


def event(user_id: Any = "u", user_hash: Any = None, **fields: Any) -> dict[str, Any]:
    """Return a track event of a user."""
    context = {} if user_hash is None else {"context": {"userHash": user_hash}}
    return {"type": "track", "userId": user_id, "event": "E", **context, **fields}


@asynccontextmanager
async def verifying(tmp_path: Path, **options: Any) -> AsyncIterator[Serving]:
    options = {"workspace": TWO, "config_extra": OTHERS, **options}
    async with serving(tmp_path, **options) as server:
        yield server


async def texts(server: Serving) -> str:
    """Return everything that is stored of events and dead letters, as text."""
    parts = [event.body for event in await server.events()]
    for letter in await server.dead_letters():
        parts += [letter.item, letter.envelope or b"", repr(letter).encode()]
    return b"\n".join(parts).decode()


async def test_a_user_id_needs_its_hash(tmp_path: Path) -> None:
    """The hash is a credential, so it is not stored."""
    async with verifying(tmp_path) as server:
        for number, (route, fields) in enumerate(ROUTES.items()):
            body = {**fields, "userId": "u", "anonymousId": "v"}
            check_error(await server.send(f"/v1/{route}", body), 403, CODE)
            assert len(await server.events()) == number
            body["context"] = {"userHash": hash_of("u"), "locale": "de"}
            assert (await server.send(f"/v1/{route}", body)).status == 200
        for stored in await server.events():
            assert stored.document()["context"] == {"locale": "de", "engage": {"verified": True}}
        assert await server.dead_letters() == []


#: User ids, each with a hash that is not that of the id as it is stored.
WRONG: list[tuple[Any, Any]] = [
    *(("u", hash_of("another")), ("u", hash_of("u", "the secret of other"))),
    *(("u", hash_of("u", "a secret that was removed")), ("u", hash_of("u")[:-1])),
    *(("u", hash_of("u") + "0"), ("u", hash_of("")), ("u", ""), ("u", "é" * 64), ("u", ["a"])),
    *(("u", True), ("u ", hash_of("u")), ("U", hash_of("u")), (17, hash_of("018"))),
    *((1.0, hash_of("1.0")), (True, hash_of("True")), (["u"], hash_of("u"))),
    *(({"u": 1}, hash_of("u")), ("null", hash_of("")), ("u" * 513, hash_of("u" * 513))),
]
#: User ids, each with a right hash.
RIGHT: list[tuple[Any, str]] = [
    *(("u", hash_of("u")), ("u", hash_of("u").upper()), ("u", hash_of("u", OLDER))),
    *((17, hash_of("17")), (-5, hash_of("-5")), ("17", hash_of("17"))),
    *(("ü \U0001f600", hash_of("ü \U0001f600")), ("null", hash_of("null"))),
    ("u" * 512, hash_of("u" * 512)),
]


async def test_a_wrong_hash_is_refused(tmp_path: Path) -> None:
    async with verifying(tmp_path) as server:
        for user_id, user_hash in WRONG:
            body = event(user_id, user_hash)
            check_error(await server.send("/v1/track", body), 403, CODE)
            answer = await server.send("/v1/batch", {"batch": [body]})
            codes = [rejection["code"] for rejection in answer.json["rejected"]]
            assert (answer.status, codes) == (200, [CODE]), (user_id, user_hash)
        assert [*await server.events(), *await server.dead_letters()] == []


async def test_a_right_hash_is_accepted(tmp_path: Path) -> None:
    """It is the hash of the id as it is stored, with any of the secrets."""
    async with verifying(tmp_path) as server:
        for user_id, user_hash in RIGHT:
            answer = await server.send("/v1/track", event(user_id, user_hash))
            assert answer.status == 200, (user_id, answer.body)
        stored = [one.user_id for one in await server.events()]
        assert stored == [str(user_id) for user_id, _ in RIGHT]


async def test_events_without_a_user_need_no_hash(tmp_path: Path) -> None:
    async with verifying(tmp_path) as server:
        for user in ({"userId": None}, {"userId": ""}, {}):
            body = {"anonymousId": "v", "event": "E", **user}
            assert (await server.send("/v1/track", body)).status == 200
        events = await server.events()
        assert len(events) == 3
        assert not any("engage" in event.document().get("context", {}) for event in events)


async def test_a_hash_counts_in_its_workspace_only(tmp_path: Path) -> None:
    async with verifying(tmp_path) as server:
        other = basic("key-of-other:")
        check_error(await server.send("/v1/track", event("u", hash_of("u")), key=other), 403, CODE)
        right = event("u", hash_of("u", "the secret of other"))
        assert (await server.send("/v1/track", right, key=other)).status == 200


async def test_a_server_key_needs_no_hash(tmp_path: Path) -> None:
    async with verifying(tmp_path) as server:
        key = basic(f"{SERVER_KEY}:")
        for body in (event("u"), event("u", "wrong", messageId="m")):
            assert (await server.send("/v1/track", body, key=key)).status == 200
        assert "wrong" not in await texts(server)
        assert "verified" not in await texts(server)


async def test_the_batch_has_a_hash_for_its_items(tmp_path: Path) -> None:
    async with verifying(tmp_path) as server:
        items = [
            *(event("u"), event("another"), event("another", hash_of("another"))),
            *(event("u", hash_of("another")), event("u", context={"userHash": None, "x": 1})),
            *({"type": "nothing", "userId": "another"}, {"type": "track", "userId": "another"}),
            {"type": "track", "userId": "u", "messageId": "invalid"},
            *({"type": "track", "anonymousId": "v", "event": "E"}, "no event"),
        ]
        context = {"userHash": hash_of("u"), "locale": "de"}
        answer = await server.send("/v1/batch", {"batch": items, "context": context})
        assert answer.json["accepted"] == 4
        refused = [(rejection["index"], rejection["code"]) for rejection in answer.json["rejected"]]
        unverified = [(index, CODE) for index in (1, 3, 5, 6)]
        assert refused == sorted([*unverified, (7, "invalid_payload"), (9, "invalid_payload")])
        letters = await server.dead_letters()
        assert {letter.item for letter in letters} == {
            orjson.dumps(items[7]),
            orjson.dumps("no event"),
        }
        for user in ("u", "another"):
            assert hash_of(user) not in await texts(server)


async def test_a_strict_batch_with_a_wrong_hash_stores_nothing(tmp_path: Path) -> None:
    async with verifying(tmp_path) as server:
        batch = {"batch": [event("u", hash_of("u")), event("u")]}
        headers = {"X-Strict-Mode": "1"}
        answer = await server.send("/v1/batch", batch, headers=headers)
        check_error(answer, 400, "invalid_payload")
        assert "context.userHash is missing" in answer.json["message"]
        check_error(await server.send("/v1/track", event("u"), headers=headers), 403, CODE)
        assert [*await server.events(), *await server.dead_letters()] == []


async def test_the_refusal_is_shown_without_the_hash(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics()
    caplog.set_level(logging.DEBUG)
    async with verifying(tmp_path, metrics=metrics) as server:
        wrong = hash_of("another")
        await server.send("/v1/track", event("u", wrong))
        answer = await server.send("/v1/batch", {"batch": [event("u", wrong)]})
        entries = metrics.refusals.entries()
        assert [(one["code"], one["writeKeyId"]) for one in entries] == [(CODE, "website")] * 2
        shown = f"{entries} {answer.json} {caplog.text}"
        assert wrong not in shown
        assert hash_of("u") not in shown


async def test_a_hash_is_never_stored_also_if_it_is_not_required(tmp_path: Path) -> None:
    """Clients send it before the operator requires it."""
    async with serving(tmp_path) as server:
        broken = {"type": "track", "userId": "u", "context": {"userHash": "secret-1", "x": 1}}
        for body in (event("u", "secret-2"), event(None, "secret-3", anonymousId="v"), broken):
            await server.send("/v1/track", body)
        common = {"userHash": "secret-4", "locale": "de"}
        await server.send("/v1/batch", {"batch": [event("u"), broken], "context": common})
        for number in (1, 2):
            again = event("u", "secret-5", messageId="m", properties={"n": number})
            await server.send("/v1/track", again)
        assert len(await server.events()) == 4
        letters = await server.dead_letters()
        assert len(letters) == 2
        assert "secret" not in await texts(server)
        assert {orjson.loads(one.item)["context"]["x"] for one in letters if b'"x"' in one.item}


async def test_a_retry_with_another_hash_makes_no_second_letter(tmp_path: Path) -> None:
    async with verifying(tmp_path) as server:
        for secret in (SECRET, OLDER):
            body = {"userId": "u", "context": {"userHash": hash_of("u", secret)}}
            assert (await server.send("/v1/track", body)).status == 400
        assert len(await server.dead_letters()) == 1


async def test_letters_of_verified_users_can_be_replayed(tmp_path: Path) -> None:
    async with verifying(tmp_path) as server:
        proof = {"context": {"userHash": hash_of("u")}}
        assert (await server.send("/v1/track", {"userId": "u", **proof})).status == 400
        await server.send("/v1/batch", {"batch": [{"type": "track", "userId": "u"}], **proof})
        for number in (1, 2):  # a conflict
            body = event("u", hash_of("u"), messageId="m", properties={"n": number})
            assert (await server.send("/v1/track", body)).status == 200
        letters = await server.dead_letters()
        assert [letter.reason for letter in letters].count("message_id_conflict") == 1
        for letter in letters:
            conflict = letter.reason == "message_id_conflict"
            text = None if conflict else orjson.dumps(event("u"))
            explained = await server.app.replays.check(letter, text, new_id=conflict)
            assert explained.outcome == "stored", explained
            replayed = await server.app.replays.replay(letter, text, new_id=conflict)
            assert replayed.outcome == "stored", replayed
        assert await server.dead_letters() == []


@pytest.mark.parametrize("key", ["website", "backend"])
async def test_letters_from_before_need_the_operators_word(tmp_path: Path, key: str) -> None:
    """Those of a server key do not."""
    header = BASIC if key == "website" else basic(f"{SERVER_KEY}:")
    before: dict[str, Any] = {"workspace": f'identity_secret = "{SECRET}"', "config_extra": OTHERS}
    async with serving(tmp_path, **before) as server:
        for body in (
            {"userId": "u", "context": {"engage": {"verified": True}}},
            {"anonymousId": "v"},
            event("u", messageId="m"),
            event("u", messageId="m", properties={"n": 1}, context={"engage": {"verified": True}}),
        ):
            await server.send("/v1/track", body, key=header)
        assert len(await server.dead_letters()) == 3
    async with verifying(tmp_path) as server:
        replays = server.app.replays
        for letter in await server.dead_letters():
            conflict = letter.reason == "message_id_conflict"
            fields = orjson.loads(letter.item)
            text = None if conflict else orjson.dumps({**fields, "event": "E"})
            if key == "website" and letter.user_id is not None:
                explained = await replays.check(letter, text, new_id=conflict)
                assert explained.code == CODE
                failed = await replays.replay(letter, text, new_id=conflict)
                assert failed.code == CODE
                assert "--unverified" in (failed.message or "")
                unverified = True
            else:
                unverified = False
            replayed = await replays.replay(letter, text, new_id=conflict, unverified=unverified)
            assert replayed.outcome == "stored", replayed
        assert await server.dead_letters() == []
        assert "verified" not in await texts(server)


async def test_an_edited_letter_may_have_the_hash(tmp_path: Path) -> None:
    async with serving(tmp_path, workspace=f'identity_secret = "{SECRET}"') as server:
        await server.send("/v1/track", {"userId": "u"})
    async with verifying(tmp_path) as server:
        (letter,) = await server.dead_letters()
        text = orjson.dumps(event("u", hash_of("u")))
        assert (await server.app.replays.replay(letter, text)).outcome == "stored"
        assert hash_of("u") not in await texts(server)


@pytest.mark.parametrize("verified", [True, False])
async def test_the_letter_that_a_loader_makes_is_like_any_other(
    tmp_path: Path, verified: bool
) -> None:
    async with serving(tmp_path, workspace=REQUIRED if verified else "") as server:
        await server.send("/v1/track", event("u", hash_of("u")))
        letter = letter_of_event((await server.events())[0], Conflict(["properties"]))
    async with verifying(tmp_path) as server:
        explained = await server.app.replays.check(letter, new_id=True)
        assert (explained.outcome, explained.code) == (
            ("stored", None) if verified else ("refused", CODE)
        )


async def test_it_is_verified_in_front_of_a_log(tmp_path: Path) -> None:
    broker = MemoryBroker()
    async with verifying(tmp_path, broker=broker) as server:
        check_error(await server.send("/v1/track", event("u", hash_of("x"))), 403, CODE)
        for number in (1, 2):
            body = event("u", hash_of("u"), messageId="m", properties={"n": number})
            assert (await server.send("/v1/track", body)).status == 200
        values = [read.record.value for read in broker.records]
    assert len(values) == 2
    assert not any(b"userHash" in value or hash_of("u").encode() in value for value in values)


async def test_a_profile_belongs_to_who_has_the_hash(tmp_path: Path) -> None:
    async with verifying(tmp_path) as server:
        owner = {"userId": "u", "traits": {"email": "a@b.co"}}
        proof = {"context": {"userHash": hash_of("u")}}
        assert (await server.send("/v1/identify", {**owner, **proof})).status == 200
        attack = {"context": {"userHash": hash_of("evil")}}
        writes: dict[str, dict[str, Any]] = {
            "identify": {"userId": "u", "traits": {"email": "evil@b.co"}},
            "group": {"userId": "u", "groupId": "g"},
            "alias": {"userId": "u", "previousId": "evil"},
        }
        for route, body in writes.items():
            check_error(await server.send(f"/v1/{route}", {**body, **attack}), 403, CODE)
        # Another user, or a visitor, with the id of the user changes nothing of the user.
        mine = {"userId": "evil", "anonymousId": "u", **attack}
        assert (await server.send("/v1/alias", {**mine, "previousId": "u"})).status == 200
        visitor = {"anonymousId": "u", "traits": {"email": "evil@b.co"}}
        assert (await server.send("/v1/identify", visitor)).status == 200
        profile = await server.app.store.profile("acme", "u")
        assert profile is not None
        assert profile.traits == {"email": "a@b.co"}
        assert (profile.anonymous_ids, profile.groups) == ([], [])
