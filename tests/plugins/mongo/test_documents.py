# SPDX-License-Identifier: Apache-2.0
"""Events as documents: any JSON object comes back unchanged, from the codec and from a server."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bson
import orjson
import pytest
from bson.codec_options import CodecOptions, DatetimeConversion
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engage.api import Event, Status, render_time
from engage.store.events import UnstorableError
from engage.testing import WORKSPACE, event, identify
from engage_plugins.mongo import documents
from engage_plugins.mongo.schema import PLACES, SAFE_SHARD_KEYS
from support import mongo
from support.mongo_proxy import Proxy

CODEC: Any = CodecOptions(datetime_conversion=DatetimeConversion.DATETIME_MS)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["", ".", "$", "a.b", "$set", "\0", "a\0b", "%", "%2E", "%25", "_id", "_seq", " a", "a ", "__"]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.just(-0.0)
    | text
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)
objects = st.dictionaries(text, values, max_size=6)


def make_event(fields: dict[str, Any], message_id: str = "m", user_id: str | None = "u") -> Event:
    """Make an event as the normaliser does: times and ids are in the document."""
    at = 1_700_000_000_123
    document = {
        **fields,
        "type": "track",
        "messageId": message_id,
        "event": "Clicked",
        "workspaceId": WORKSPACE,
        "timestamp": "2023-11-14T22:13:20.123Z",
        "receivedAt": "2023-11-14T22:13:21.123Z",
        "source": "api",
    }
    if user_id is not None:
        document["userId"] = user_id
    return Event(
        workspace_id=WORKSPACE,
        origin="api",
        message_id=message_id,
        type="track",
        user_id=user_id,
        anonymous_id=None,
        name="Clicked",
        received_at=at + 1000,
        timestamp=at,
        body=orjson.dumps(document),
    )


#: Fields that the server sets.
OWN = {"type", "messageId", "event", "workspaceId", "timestamp", "receivedAt", "source", "userId"}


def encode(event: Event, mark: str | None = None) -> dict[str, Any]:
    key = documents.event_id(*event.identity)
    encoded = documents.encode_event(event, key, documents.Sequencer()(), mark)
    decoded: dict[str, Any] = bson.decode(encoded, CODEC)
    return decoded


def exactly(value: Any) -> Any:
    """Return a form in which only identical values are equal (``1`` and ``1.0`` differ)."""
    if isinstance(value, dict):
        return {key: exactly(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [exactly(inner) for inner in value]
    if isinstance(value, float):
        return struct.pack("<d", value)
    return (type(value).__name__, value)


@given(objects)
def test_any_object_comes_back_byte_for_byte(fields: dict[str, Any]) -> None:
    event = make_event({name: value for name, value in fields.items() if name not in OWN})
    assert documents.decode_event(encode(event)) == event


@given(text)
def test_keys_are_escaped_reversibly(key: str) -> None:
    escaped = documents.escape_key(key)
    assert documents.unescape_key(escaped) == key
    assert escaped
    assert "." not in escaped
    assert "\0" not in escaped
    assert not escaped.startswith("$")
    assert escaped == escaped.strip()


@given(st.lists(st.tuples(text, text, text), min_size=2, max_size=2, unique=True))
def test_ids_of_documents_never_collide(identities: list[tuple[str, str, str]]) -> None:
    first, second = identities
    assert documents.event_id(*first) != documents.event_id(*second)
    assert documents.pair_id(*first) != documents.pair_id(*second)


def test_a_document_has_fields_for_queries() -> None:
    document = encode(make_event({"properties": {"price": 9.5, "a.b": {"$c": 1}}}), "mark")
    assert document["_id"] == f"{WORKSPACE}:api:m"
    assert document["_name"] == "Clicked"
    assert document["_mark"] == "mark"
    assert int(document["timestamp"]) == 1_700_000_000_123
    assert int(document["receivedAt"]) == 1_700_000_001_123
    assert document["properties"] == {"price": 9.5, "a%2Eb": {"%24c": 1}}
    assert "_raw" not in document


def test_a_field_cannot_replace_a_field_of_the_storage() -> None:
    event = make_event({"_id": "x", "_seq": 1, "_mark": 2, "_raw": 3, "_name": 4, "%5Fid": 5})
    document = encode(event)
    assert document["_id"] == f"{WORKSPACE}:api:m"
    assert "_mark" not in document
    assert documents.decode_event(document) == event


def test_indexed_fields_come_from_the_event() -> None:
    """A body that disagrees with the event still comes back unchanged."""
    event = dataclasses.replace(make_event({}), user_id=None, name=None)
    document = encode(event)
    assert "userId" not in document
    assert documents.decode_event(document) == event


@pytest.mark.parametrize("value", [2**63, 2**64 - 1])
def test_an_integer_beyond_64_bits_is_refused(value: int) -> None:
    event = dataclasses.replace(make_event({}), body=b'{"n": %d}' % value)
    with pytest.raises(UnstorableError):
        encode(event)


def test_an_event_of_more_than_16_mib_is_refused() -> None:
    with pytest.raises(UnstorableError, match="16 MiB"):
        encode(make_event({"text": "x" * (16 * 1024 * 1024)}))


def test_the_order_of_arrival_grows_with_any_clock() -> None:
    sequence, other = documents.Sequencer(), documents.Sequencer()
    given_ = [sequence() for _ in range(1000)]
    assert given_ == sorted(set(given_))
    ahead = documents.ObjectId((2**50).to_bytes(7, "big") + b"\xff" * 5)
    assert other(ahead) > ahead


# -------------------------------------------------------------------------------- through a server
def nested_arrays(value: Any) -> bool:
    if isinstance(value, dict):
        return any(nested_arrays(inner) for inner in value.values())
    if isinstance(value, list):
        return any(isinstance(inner, list) or nested_arrays(inner) for inner in value)
    return False


@pytest.mark.mongo
@pytest.mark.parametrize("kind", mongo.kinds())
def test_any_object_comes_back_from_a_server(kind: str, tmp_path: Any) -> None:
    store = mongo.make_store(tmp_path, mongo.shared(kind).url())
    nested = mongo.can(kind, "nested-arrays")
    with asyncio.Runner() as runner:
        runner.run(store.open(create=True))
        count = 0

        @given(objects)
        @settings(max_examples=40, suppress_health_check=list(HealthCheck))
        def through(fields: dict[str, Any]) -> None:
            nonlocal count
            count += 1
            rest = {name: value for name, value in fields.items() if name not in OWN}
            # As properties and as traits: each trait is stored separately.
            traits = make_event({"traits": rest, "properties": rest}, f"m{count}", f"u{count}")
            event = dataclasses.replace(
                traits,
                type="identify",
                name=None,
                body=traits.body.replace(b'"type":"track"', b'"type":"identify"'),
            )
            runner.run(check(event, rest))

        async def check(event: Event, fields: dict[str, Any]) -> None:
            (outcome,) = await store.write([event])
            if nested_arrays(fields) and not nested:
                assert outcome.status is Status.REFUSED
                return
            assert outcome.status is Status.STORED
            assert await store.find(*event.identity) == event
            profile = await store.profile(WORKSPACE, event.user_id or "")
            assert profile is not None
            assert exactly(profile.traits) == exactly(orjson.loads(orjson.dumps(fields)))

        async def extremes() -> None:
            deep: Any = 1
            for _ in range(61):
                deep = {"d": deep}
            large = {"text": "ä" * (5 * 1024 * 1024 // 2)}
            for number, fields in enumerate(({"deep": deep}, large, {"f": -math.pi * 1e-300})):
                event = make_event(fields, f"extreme{number}")
                assert (await store.write([event]))[0].status is Status.STORED
                assert await store.find(*event.identity) == event

        try:
            through()
            runner.run(extremes())
        finally:
            runner.run(store.close())


@pytest.mark.parametrize("levels", [200, 300, 450])
@pytest.mark.parametrize("name", ["a", "a.b"])
def test_an_event_that_is_nested_deeper_than_a_request_can_be_read(levels: int, name: str) -> None:
    """Otherwise it would end each scan."""
    plain = event("m", user_id="u")
    times = {"timestamp": plain.timestamp, "receivedAt": plain.received_at}
    fields = {**plain.document(), **{key: render_time(at) for key, at in times.items()}}
    deep = f'{{"{name}":' * levels + "1" + "}" * levels
    body = f'{json.dumps(fields)[:-1]},"deep":{deep}}}'.encode()
    made = dataclasses.replace(plain, body=body)
    key = documents.event_id(WORKSPACE, "api", "m")
    encoded = documents.encode_event(made, key, documents.Sequencer()(), None)
    found = documents.decode_event(bson.decode(encoded, CODEC))
    assert orjson.loads(found.body) == orjson.loads(body)


async def test_an_upsert_names_the_shard_key_that_the_documentation_advises(tmp_path: Path) -> None:
    """MongoDB below 7.1 cannot insert otherwise."""
    page = Path(__file__).parents[3].joinpath("docs/scaling.md").read_text("utf-8")
    advised = dict(re.findall(r'shardCollection\("engage[.](\w+)", {(\w+): "hashed"}\)', page))
    changing = [
        event("1", type="group", user_id="u", anonymous_id="v", groupId="g", traits={"a": 1}),
        identify("2", "u", traits={"a": 1, "email": "a@b.c"}),
        event("3", type="identify", anonymous_id="v", traits={"email": "a@b.c"}),
        event("4", type="group", anonymous_id="v", groupId="g"),
    ]
    upserted = dict[str, list[Mapping[str, Any]]]()

    def look(name: str, command: Mapping[str, Any]) -> None:
        if name == "update":
            upserts = [update for update in command["updates"] if update.get("upsert")]
            upserted.setdefault(command["update"], []).extend(upserts)

    with Proxy(mongo.shared(mongo.proxied_kind()).address) as proxy:
        url = proxy.url(f"engage_test_{os.urandom(6).hex()}")
        async with mongo.opened(tmp_path, url, identifiers={WORKSPACE: ["email"]}) as store:
            proxy.rule = look
            await store.write(changing)
            proxy.rule = None
    places = {name for place in PLACES.values() for name in dataclasses.astuple(place)}
    assert SAFE_SHARD_KEYS.keys() & places | {"links"} <= upserted.keys()
    for collection in SAFE_SHARD_KEYS.keys() & places | {"links"}:
        assert upserted[collection]
        assert all(advised[collection] in one["q"] for one in upserted[collection])
