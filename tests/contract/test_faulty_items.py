# SPDX-License-Identifier: Apache-2.0
"""An item that cannot be stored is refused alone, by every route that takes several.

Which items these are is tested without HTTP: ``pipeline/test_faulty_items.py``.
"""

from __future__ import annotations

import gzip
import hashlib
import hmac
from pathlib import Path
from typing import Any

import pytest

from engage.api import DeadLetter, Event
from support.log_loading import items_of
from support.log_loading import load as load_log
from support.memory_log import MemoryBroker
from support.server_inprocess import BASIC, Serving, serving
from support.server_process import KEY

FAULTS = {
    "half an emoji in an id": r'"messageId":"m\ud83d"',
    "an integer beyond 64 bits": '"properties":{"a":12345678901234567890}',
    "a number beyond a double": '"properties":{"a":[1e400]}',
    "levels": '"properties":{"a":' + "[" * 70 + "]" * 70 + "}",
    "very many levels": '"properties":{"a":' + "[" * 2000 + "]" * 2000 + "}",
    "two keys that become one": r'"properties":{"\ud83d":1,"\ud83e":2}',
}
#: What has a faithful form, in each place.
KEPT = (
    r'"event":"e\ud83d","properties":{"\ude00":'
    r'["\ud83d",18446744073709552000,10000000000000000000]}'
)
ITEM = '{"type":"track","userId":"u","event":"e","messageId":"%s"%s}'
FIRST, LAST = ITEM % ("first", "," + KEPT), ITEM % ("last", "")
HOOKS = """
[workspaces.webhooks.rudderstack]
header = "X-Secret"
value = "a-secret-of-rudderstack"

[workspaces.webhooks.segment]
secret = "a-secret-of-segment"
allow_batch = true
"""


async def check_stored(server: Serving, origin: str = "api") -> None:
    """Check that the items beside the faulty one are stored, and only these."""
    events = {event.message_id: event.document() for event in await server.events()}
    assert sorted(events) == ["first", "last"]
    assert events["first"]["event"] == "e\ufffd"
    assert events["first"]["properties"] == {"\ufffd": ["\ufffd", 18446744073709552000.0, 1e19]}


@pytest.mark.parametrize("fault", FAULTS)
async def test_every_route_of_batches_refuses_the_item_alone(tmp_path: Path, fault: str) -> None:
    faulty = ITEM % ("odd", "," + FAULTS[fault])
    body = f'{{"batch":[{FIRST},{faulty},{LAST}],"writeKey":"{KEY}"}}'.encode()
    requests: list[tuple[str, dict[str, Any]]] = [
        *((path, {}) for path in ("/api/public/apps/batch", "/v1/batch", "/v1/b", "/v1/import")),
        ("/v1/import/", {"key": None}),
        ("/beacon/v1/batch", {"key": None, "headers": {"Content-Type": "text/plain"}}),
        (f"/beacon/v1/batch?writeKey={KEY}", {"key": None, "headers": {"Origin": "null"}}),
        ("/v1/batch", {"headers": {"Content-Encoding": "gzip"}}),
    ]
    async with serving(tmp_path) as server:
        for number, (path, options) in enumerate(requests):
            sent = gzip.compress(body) if "Content-Encoding" in str(options) else body
            answer = await server.send(path, sent, **options)
            stored = (answer.json["accepted"], answer.json["duplicates"])
            assert (answer.status, stored) == (200, (0, 2) if number else (2, 0))
            [rejected] = answer.json["rejected"]
            assert (rejected["index"], rejected["code"]) == (1, "invalid_json")
            assert rejected["errors"]
        await check_stored(server)
        [letter] = await server.dead_letters()
        assert (letter.reason, letter.operation) == ("invalid_json", "batch")
        strict = await server.send("/v1/batch", body, headers={"X-Strict-Mode": "1"})
        assert strict.status == 400
        answer = await server.send("/v1/batch", body.replace(b'],"writeKey"', b',NaN],"writeKey"'))
        assert (answer.status, answer.json["code"]) == (400, "invalid_json")
        assert answer.json["errors"][0]["pointer"] == "/batch/3"


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_single_event_with_a_fault_is_kept(tmp_path: Path, fault: str) -> None:
    async with serving(tmp_path) as server:
        answer = await server.send("/v1/track", FIRST.encode())
        assert answer.status == 200
        await server.send("/v1/track", LAST.encode())
        faulty = (ITEM % ("odd", "," + FAULTS[fault])).encode()
        for key, body in (
            (BASIC, faulty),
            (None, faulty[:-1] + f',"writeKey":"{KEY}"}}'.encode()),
        ):
            answer = await server.send("/v1/track", body, key=key)
            assert (answer.status, answer.json["code"]) == (400, "invalid_json")
        await check_stored(server)
        [letter] = await server.dead_letters()
        assert (letter.reason, letter.operation, letter.user_id) == ("invalid_json", "track", "u")
        assert KEY.encode() not in letter.item


async def test_faulty_items_go_through_a_log(tmp_path: Path) -> None:
    """The events that are read from it are those that were stored without one."""
    broker = MemoryBroker()
    async with serving(tmp_path, broker=broker) as server:
        faulty = ",".join(
            ITEM % (f"odd{number}", "," + text) for number, text in enumerate(FAULTS.values())
        )
        answer = await server.send("/v1/batch", f'{{"batch":[{FIRST},{faulty},{LAST}]}}'.encode())
        assert (answer.status, answer.json["accepted"]) == (200, 2)
        kinds = [type(item) for item in items_of(broker)]
        assert (kinds.count(Event), kinds.count(DeadLetter)) == (2, len(FAULTS))
        await load_log(broker, server.app.store)
        await check_stored(server)
        letters = await server.dead_letters()
        assert len(letters) == len(FAULTS)
        assert {letter.reason for letter in letters} == {"invalid_json"}
        for letter in letters:
            explained = await server.app.replays.check(letter)
            assert explained.code in ("invalid_json", "not_replayable")


@pytest.mark.parametrize("name", ["rudderstack", "segment"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_webhook_with_several_events_loses_one(
    tmp_path: Path, name: str, fault: str
) -> None:
    """The whole delivery is kept, because it may be translated one day."""
    body = f"[{FIRST},{ITEM % ('odd', ',' + FAULTS[fault])},{LAST}]".encode()
    signed = hmac.new(b"a-secret-of-segment", FIRST.encode(), hashlib.sha1).hexdigest()
    headers = {"X-Secret": "a-secret-of-rudderstack", "X-Signature": signed}
    async with serving(tmp_path, workspace=HOOKS) as server:
        path = f"/api/public/webhooks/{name}"
        answer = await server.send(path, body, key=None, headers=headers)
        assert (answer.status, answer.json["accepted"]) == (200, 2)
        await check_stored(server)
        [letter] = await server.dead_letters()
        assert letter.item == body
        assert [error["pointer"] for error in letter.errors] == ["/1"]
        result = await server.app.deliveries.retry(letter)
        assert (result.accepted, result.duplicates, result.rejected) == (0, 2, 1)


async def test_an_event_that_differs_in_its_time_is_a_duplicate(tmp_path: Path) -> None:
    """An SDK stamps the time of each call; the first event stays."""
    async with serving(tmp_path) as server:
        for number, time in enumerate(
            ["2026-01-02T03:04:05Z", "2026-01-02T03:04:05.300Z", "2026-01-03T03:04:05Z"]
        ):
            item = {"type": "track", "userId": "u", "event": "E", "messageId": "m"}
            fields = {"timestamp": time, "originalTimestamp": time, "sentAt": time}
            assert (await server.send("/v1/track", {**item, **fields})).status == 200
            answer = await server.send("/v1/batch", {"batch": [{**item, "timestamp": time}]})
            assert answer.json["duplicates"] == 1, number
        assert (await server.stored("m"))["originalTimestamp"] == "2026-01-02T03:04:05Z"
        assert await server.dead_letters() == []
        await server.send("/v1/track", {**item, "timestamp": "2026-01-03T03:04:05.001Z"})
        [letter] = await server.dead_letters()
        assert letter.reason == "message_id_conflict"
        assert "originalTimestamp" in letter.message
