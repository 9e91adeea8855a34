# SPDX-License-Identifier: Apache-2.0
"""Which write keys count, and how operators change them."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
from typing import Any

import orjson
import pytest

from engage.api import EngageError, Record
from engage.audit import AUDIT, Actor, read_entry
from engage.config import Workspace, WriteKey
from engage.keys.changes import KeyChangedError, KeyState, change_key, create_key
from engage.keys.effective import (
    KEY,
    OVERRIDE,
    Key,
    effective_keys,
    list_keys,
    options_of,
    rate_of,
    shown_rate,
)
from engage.store.facade import Storage
from support.each import each

ACME = Workspace(
    id="acme",
    name="Acme",
    write_keys=(
        WriteKey(id="website", key="key-1"),
        WriteKey(id="old", key="key-0", disabled=True),
    ),
)
OTHER = Workspace(id="other", name="Other")
WORKSPACES = (ACME, OTHER)
ANN = Actor(who="ann", origin="test")
NOW = 1_795_253_400_000


def stored(key_id: str, key: object, workspace: str = "acme", **body: Any) -> Record:
    """Return the record of a key."""
    encoded = orjson.dumps({"id": key_id, "key": key, **body})
    return Record(kind=KEY, workspace_id=workspace, id=key_id, body=encoded, at=NOW, version=3)


def override(key_id: str, body: bytes) -> Record:
    return Record(kind=OVERRIDE, workspace_id="acme", id=key_id, body=body, at=NOW, version=2)


def found(*records: Record) -> dict[str, Key]:
    """Return the effective keys by their ids."""
    return {key.id: key for key in effective_keys(WORKSPACES, records).keys}


def test_keys_of_the_config_come_first_and_those_of_the_store_follow() -> None:
    keys = effective_keys(WORKSPACES, [stored("z", "a" * 32, "other"), stored("b", "b" * 32)])
    assert [(key.workspace_id, key.id, key.source) for key in keys.keys] == [
        ("acme", "website", "config"),
        ("acme", "old", "config"),
        ("acme", "b", "store"),
        ("other", "z", "store"),
    ]
    assert keys.problems == []
    assert keys.secrets == {"key-0", "key-1", "a" * 32, "b" * 32}
    assert "b" * 32 not in repr(keys)


def test_the_config_wins() -> None:
    """Over a record with the same id, and over one with the same key in any workspace."""
    keys = effective_keys(
        WORKSPACES,
        [
            stored("website", "f" * 32, disabled=True),
            stored("copy", "key-1", "other", disabled=True),
            stored("first", "c" * 32),
            stored("second", "c" * 32, "other"),
            stored("lost", "d" * 32, "gone"),
        ],
    )
    assert [key.id for key in keys.keys] == ["website", "old", "first"]
    assert not keys.keys[0].disabled
    assert [problem.partition(" is ignored")[0] for problem in keys.problems] == [
        "the key 'website' of the workspace 'acme' in the store",
        "the key 'lost' of the workspace 'gone' in the store",
        "the key 'copy' of the workspace 'other' in the store",
        "the key 'second' of the workspace 'other' in the store",
    ]
    # Keys that are ignored must not be logged either, and no problem names one.
    assert {"f" * 32, "c" * 32, "d" * 32} < keys.secrets
    assert not any(secret in problem for secret in keys.secrets for problem in keys.problems)


@each(
    "body, disabled",
    [
        *((b'{"disabled":true}', True), (b'{"disabled":false}', False), (b'{"disabled":0}', True)),
        *((b"{}", True), (b"[]", True), (b"?", True)),
    ],
)
def test_an_override_that_is_not_understood_disables(body: bytes, disabled: bool) -> None:
    keys = found(override("website", body), override("old", b'{"disabled":false}'))
    assert (keys["website"].disabled, keys["website"].version) == (disabled, 2)
    assert keys["old"].disabled
    assert keys["old"].disabled_in_config


@each(
    "body, disabled, archived",
    [
        *(({}, False, False), ({"disabled": False, "archived": False}, False, False)),
        *(({"disabled": True}, True, False), ({"disabled": None}, True, False)),
        *(({"archived": True}, True, True), ({"archived": "no"}, True, True)),
    ],
)
def test_the_state_of_a_stored_key(body: dict[str, Any], disabled: bool, archived: bool) -> None:
    key = found(stored("ios", "a" * 32, **body))["ios"]
    assert (key.disabled, key.archived, key.version) == (disabled, archived, 3)


async def test_a_server_key_is_in_the_store_as_its_hash(store: Storage) -> None:
    made = await create(store, "backend", options={"kind": "server"})
    digest = hashlib.sha256(made.key.encode()).hexdigest()
    record = await store.get_record(KEY, "acme", "backend")
    assert record is not None
    body = orjson.loads(record.body)
    assert (body["sha256"], body["kind"], "key" in body) == (digest, "server", False)
    (key,) = (key for key in effective_keys((ACME,), [record]).keys if key.id == "backend")
    assert (key.sha256, key.key, key.kind) == (digest, "", "server")
    assert key == dataclasses.replace(made, key="", sha256=digest)
    assert digest not in repr(key)
    page = await store.list_records(AUDIT, limit=10)
    assert not any(made.key.encode() in record.body for record in page.items)
    # The same text as a public key would be both.
    both = effective_keys((ACME,), [record, stored("copy", made.key)])
    assert [key.id for key in both.keys] == ["website", "old", "backend"]
    assert "is the same" in both.problems[0]


async def test_the_options_of_a_key_are_those_of_the_config(store: Storage) -> None:
    options = {"origins": ["https://shop.example.com"], "operations": ["track", "page"]}
    made = await create(store, "shop", options=options)
    assert options_of(made) == options
    assert (await keys_of(store))["shop"] == made
    assert (made.kind, made.origins) == ("public", ("https://shop.example.com",))
    assert options_of(ACME.write_keys[0]) == {}
    again = await create(store, "shop-2", options=options_of(made))
    assert again.operations == made.operations


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "secret"}, "kind: must be one of"),
        *(({"origins": []}, "origins: must not be empty"), ({"origins": ["null"]}, "origins")),
        ({"rate": {"bytes_per_second": 1e-7}}, "rate.bytes_per_second: must be 0 or at least"),
        ({"origins": ["https://a.example.com:443"]}, "leave out the port"),
        ({"kind": "server", "origins": ["https://a.example.com"]}, "origins: every web page"),
        ({"unknown": 1}, "unknown"),
    ],
)
async def test_an_option_that_is_not_possible_is_refused(
    store: Storage, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngageError, match=message):
        await create(store, "new", options=options)
    assert "new" not in await keys_of(store)


@each(
    "record",
    [
        *(stored("ios", "a" * 32, kind="other"), stored("ios", "a" * 32, kind="server")),
        stored("ios", "a" * 32, sha256="b" * 64),
        stored("ios", "a" * 32, origins="https://a.example.com"),
        *(stored("ios", "a" * 32, operations=[1]), stored("ios", None), stored("ios", "")),
        *(stored("ios", "a b"), stored("ios", "a:b"), stored("ios", "a" * 513)),
        *(stored("i os", "a" * 32), dataclasses.replace(stored("ios", "a"), body=b"[1]")),
        dataclasses.replace(stored("ios", "a"), body=b"{"),
    ],
)
def test_a_record_that_is_not_valid_is_reported(record: Record) -> None:
    keys = effective_keys(WORKSPACES, [record])
    assert len(keys.keys) == 2
    (problem,) = keys.problems
    assert problem.endswith("is not valid, and is ignored")


def test_an_override_without_its_key_is_reported() -> None:
    keys = effective_keys(WORKSPACES, [override("gone", b'{"disabled":true}')])
    (problem,) = keys.problems
    assert "'gone'" in problem


# ----------------------------------------------------------------------------------------- changes
async def create(store: Storage, key_id: str, **options: Any) -> Key:
    options.setdefault("workspace_id", "acme")
    return await create_key(store, WORKSPACES, key_id=key_id, actor=ANN, now=NOW, **options)


async def keys_of(store: Storage) -> dict[str, Key]:
    return {key.id: key for key in (await list_keys(store, WORKSPACES)).keys}


async def change(store: Any, key_id: str, state: KeyState, expected: int | None = None) -> bool:
    return await change_key(
        store, WORKSPACES, "acme", key_id, state, actor=ANN, now=NOW, expected_version=expected
    )


async def entries(store: Storage) -> list[tuple[str, str]]:
    """Return the actions in the audit and their keys, oldest first."""
    page = await store.list_records(AUDIT, limit=100)
    read = sorted(map(read_entry, page.items), key=lambda entry: entry.action)
    assert all(entry.actor == ANN and entry.at == NOW for entry in read)
    assert all(entry.details["workspace"] == "acme" for entry in read)
    return [(entry.action, entry.details["key"]) for entry in read]


async def test_a_key_is_created(store: Storage) -> None:
    made = await create(store, "ios", name=" iOS app ")
    assert re.fullmatch("[0-9a-f]{32}", made.key)
    assert (await keys_of(store))["ios"] == made
    assert (made.name, made.created_at, made.created_by) == ("iOS app", NOW, "ann")
    record = await store.get_record(KEY, "acme", "ios")
    assert record is not None
    assert orjson.loads(record.body) == {
        "id": "ios",
        "key": made.key,
        "name": "iOS app",
        "createdAt": NOW,
        "by": "ann",
        "disabled": False,
    }
    assert (await create(store, "ios", workspace_id="other")).key != made.key
    page = await store.list_records(AUDIT, limit=10)
    assert not any(made.key.encode() in record.body for record in page.items)


@pytest.mark.parametrize(
    ("key_id", "options", "message"),
    [
        *(("website", {}, "already has a key"), ("ios", {}, "already has a key")),
        *(("", {}, "the id of a key"), ("a b", {}, "the id of a key")),
        *(("-a", {}, "the id of a key"), ("a" * 65, {}, "the id of a key")),
        ("new", {"workspace_id": "nope"}, "workspace 'nope'"),
        ("new", {"name": "x" * 257}, "256 characters"),
    ],
)
async def test_a_key_that_is_not_possible_is_refused(
    store: Storage, key_id: str, options: dict[str, Any], message: str
) -> None:
    made = await create(store, "ios")
    with pytest.raises(EngageError, match=message):
        await create(store, key_id, **options)
    assert (await keys_of(store))["ios"] == made


async def test_the_id_of_an_archived_key_stays_taken(store: Storage) -> None:
    await create(store, "ios")
    assert await change(store, "ios", "archived")
    assert not await change(store, "ios", "archived")
    assert not await change(store, "ios", "disabled")
    with pytest.raises(EngageError, match="is archived"):
        await change(store, "ios", "enabled")
    with pytest.raises(EngageError, match="already has a key"):
        await create(store, "ios")
    key = (await keys_of(store))["ios"]
    assert (key.disabled, key.archived) == (True, True)
    assert await entries(store) == [("key-archived", "ios"), ("key-created", "ios")]


async def test_what_another_version_wrote_into_a_record_stays(store: Storage) -> None:
    await store.put_record(stored("ios", "a" * 32, later={"x": 1}))
    assert await change(store, "ios", "disabled")
    record = await store.get_record(KEY, "acme", "ios")
    assert record is not None
    body = orjson.loads(record.body)
    assert (body["later"], body["disabled"]) == ({"x": 1}, True)


async def test_a_change_that_is_not_possible_is_refused(store: Storage) -> None:
    impossible: tuple[tuple[KeyState, str, str], ...] = (
        ("disabled", "nope", "does not exist"),
        ("enabled", "old", "is disabled in the config file"),
        ("archived", "website", "is in the config file"),
    )
    for state, key_id, message in impossible:
        with pytest.raises(EngageError, match=message):
            await change(store, key_id, state)
    # It is disabled already, and stays so when the file changes.
    assert not await change(store, "old", "disabled")
    with pytest.raises(EngageError, match="workspace 'nope'"):
        await change_key(store, WORKSPACES, "nope", "ios", "disabled", actor=ANN, now=NOW)
    assert await entries(store) == []


@pytest.mark.parametrize("key_id", ["ios", "website"])
async def test_two_operators_do_not_overwrite_each_other(store: Storage, key_id: str) -> None:
    """Both look at a page, and the second one acts on what is there no more."""
    await create(store, "ios")
    seen = (await keys_of(store))[key_id].version
    assert await change(store, key_id, "disabled", expected=seen)
    states: tuple[KeyState, ...] = ("enabled", "disabled")
    for state in states:
        with pytest.raises(KeyChangedError, match="another operator"):
            await change(store, key_id, state, expected=seen)
    assert (await keys_of(store))[key_id].disabled


async def test_of_many_at_once_one_succeeds(store: Storage) -> None:
    made = await asyncio.gather(*(create(store, "ios") for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(one, Key) for one in made) == 1
    assert sum(isinstance(one, EngageError) for one in made) == 7
    version = (await keys_of(store))["ios"].version
    changed = await asyncio.gather(
        *(change(store, "ios", "disabled", expected=version) for _ in range(8)),
        return_exceptions=True,
    )
    assert changed.count(True) == 1
    assert sum(isinstance(one, KeyChangedError) for one in changed) == 7
    # Without an expected version all agree.
    assert sorted(await asyncio.gather(*(change(store, "ios", "enabled") for _ in range(4)))) == [
        False,
        False,
        False,
        True,
    ]


async def test_many_keys_are_read(store: Storage) -> None:
    """More than one page of records."""
    for number in range(1100):
        await store.put_record(stored(f"k{number}", f"{number:032x}"))
    assert len(await keys_of(store)) == 1102


@each(
    "text, rate",
    [
        ("", {}),
        ("100", {"events_per_second": 100}),
        ("0.5, burst=7", {"events_per_second": 0.5, "burst": 7}),
        ("bytes_per_second=1000000 100", {"bytes_per_second": 1_000_000, "events_per_second": 100}),
    ],
)
def test_a_rate_is_a_number_or_names_with_numbers(text: str, rate: dict[str, float]) -> None:
    assert rate_of(text) == rate_of(shown_rate(rate)) == rate


@each(
    "text, words",
    [
        # A number with a separator would otherwise mean 0: no limit.
        *(("1,000", "events_per_second twice"), ("burst=5 burst=6", "burst twice"), ("=5", "'=5'")),
        *(("fast", "'fast'"), ("-1", "'-1'"), ("burst=", "'burst='")),
    ],
)
def test_a_rate_that_can_mean_two_things_is_an_error(text: str, words: str) -> None:
    with pytest.raises(EngageError, match=words):
        rate_of(text)
