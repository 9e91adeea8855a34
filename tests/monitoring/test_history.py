# SPDX-License-Identifier: Apache-2.0
"""The counters of the console's history."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
import pytest

from engage.api import Count, Record, StorageUnavailable
from engage.monitoring import history as module
from engage.monitoring.history import (
    DAY,
    EVENTS,
    HOUR,
    MINUTE,
    QUEUE,
    REFUSED,
    REQUESTS,
    STORED,
    UP,
    History,
    expire_history,
    record_periodically,
)
from engage.monitoring.metrics import Metrics
from engage.monitoring.sampler import MAX_ENTRIES, REFUSED_RECORD, Refusal, Refusals, key_prefix
from engage.store.counts import COUNTS
from engage.store.facade import Storage
from engage.testing import MemoryStore
from support.each import each
from support.server_inprocess import serving

#: 2026-11-22T12:00:00Z.
NOON = 1_795_348_800_000


async def sums(
    store: Storage, step: int = MINUTE
) -> Mapping[tuple[int, str, tuple[str, ...]], int]:
    page = await store.counts(step, since=0, until=NOON * 2, limit=1000)
    return {(count.at, count.name, count.labels): count.total for count in page.items}


def started(now: int = NOON) -> History:
    history = History(Metrics())
    history.turn(now)
    return history


async def test_events_are_counted_in_their_minute_and_hour() -> None:
    stored = ("website", "track", "stored")
    store = MemoryStore()
    history = started()
    history.metrics.event("track", "stored", 2, "acme", "website")
    await history.write_to(store)
    history.metrics.event("track", "stored", 1, "acme", "website")
    history.turn(NOON + 60_000)
    history.metrics.event("track", "stored", 5, "acme", "website")
    await history.write_to(store)
    history.turn(NOON + 3_600_000)
    await history.write_to(store)
    minutes = await sums(store)
    assert minutes[NOON, EVENTS, stored] == 3
    assert minutes[NOON + 60_000, EVENTS, stored] == 5
    hours = await sums(store, HOUR)
    assert hours[NOON, EVENTS, stored] == 8
    assert (NOON + 3_600_000, EVENTS, stored) not in hours


async def test_every_minute_in_which_a_process_ran_has_a_row() -> None:
    store = MemoryStore()
    history = started()
    for minute in range(3):
        history.turn(NOON + minute * 60_000)
        await history.write_to(store)
    page = await store.counts(MINUTE, since=NOON, until=NOON + 180_000, names=[UP], limit=9)
    assert [count.processes for count in page.items] == [1, 1, 1]


async def test_a_write_that_is_repeated_counts_nothing_twice() -> None:
    class Failing(MemoryStore):
        """Applies a write, and fails all the same, as a time-out may."""

        fails = True

        async def put_counts(self, counts: Sequence[Count]) -> None:
            await super().put_counts(counts)
            if self.fails:
                raise StorageUnavailable("no answer within 8 seconds")

    store, history = Failing(), started()
    history.metrics.event("page", "stored", 7, "acme", "website")
    with pytest.raises(StorageUnavailable):
        await history.write_to(store)
    store.fails = False
    await history.write_to(store)
    assert (await sums(store))[NOON, EVENTS, ("website", "page", "stored")] == 7


async def test_minutes_without_the_store_are_written_later() -> None:
    store = MemoryStore()
    history = started()
    for minute in range(3):
        history.metrics.event("page", "stored", minute + 1, "acme", "website")
        history.turn(NOON + (minute + 1) * 60_000)
    await history.write_to(store)
    found = await sums(store)
    assert [
        found[NOON + minute * 60_000, EVENTS, ("website", "page", "stored")] for minute in range(3)
    ] == [1, 2, 3]


async def test_two_processes_add_up_and_the_longest_queue_counts() -> None:
    store = MemoryStore()
    for waiting in (3, 9, 4):
        history = started()
        history.metrics.event("track", "duplicate", 1, "acme", "website")
        history.metrics.write(0.002, 1, waiting)
        history.metrics.write(0.002, 1, 0)
        history.metrics.request("track", 200, 0.002)
        history.metrics.request("healthz", 200, 0.002)
        # A stranger is made to wait, and a slow client is not the server's fault.
        for status in (400, 401, 403, 404, 408, 429):
            history.metrics.request("track", status, 0.8)
        await history.write_to(store)
    found = await sums(store)
    assert found[NOON, EVENTS, ("website", "track", "duplicate")] == 3
    assert {labels: count for (_, name, labels), count in found.items() if name == REQUESTS} == {
        ("0.0025",): 3
    }
    page = await store.counts(MINUTE, since=NOON, until=NOON + 1, names=[QUEUE], limit=9)
    assert page.items[0].greatest == 9


@pytest.mark.parametrize("step", [300_000, 7_200_000])
async def test_a_clock_that_is_set_back_replaces_nothing(step: int) -> None:
    store = MemoryStore()
    history = started()
    for change in (step, -step, step):
        history.metrics.event("track", "stored", 2, "acme", "website")
        history.metrics.stored(2, 200, "acme", "website")
        await history.write_to(store)
        history.turn(history.now + change)
    await history.write_to(store)
    for length in (MINUTE, HOUR, DAY):
        found = await sums(store, length)
        name = STORED if length == DAY else EVENTS
        assert sum(count for (_, one, _), count in found.items() if one == name) == 6


async def test_what_has_not_changed_is_not_written_again() -> None:
    class Counting(MemoryStore):
        rows = 0

        async def put_counts(self, counts: Sequence[Count]) -> None:
            self.rows += len(counts)

    store = Counting()
    history = started()
    history.metrics.event("track", "stored", 1, "acme", "website")
    history.metrics.stored(1, 100, "acme", "website")
    await history.write_to(store)
    before = store.rows
    await history.write_to(store)
    assert store.rows == before
    history.metrics.event("track", "stored", 1, "acme", "website")
    history.metrics.stored(1, 100, "acme", "website")
    await history.write_to(store)
    assert store.rows == before + 4  # its minute and its hour; of its day also the bytes


async def test_memory_is_bounded_while_the_store_is_away() -> None:
    history = started()
    for minute in range(500):
        for key in range(20):
            history.metrics.event("track", "stored", 1, "acme", f"key-{key}")
        history.turn(NOON + minute * 60_000)
    store = MemoryStore()
    await history.write_to(store)
    # Those that are kept, and the current one.
    minutes = {row[1] for row in store.stored.tables.rows(COUNTS) if row[0] == MINUTE}
    assert len(minutes) <= module.MAX_UNWRITTEN + 1


@pytest.mark.virtual_time
async def test_old_counters_are_deleted() -> None:
    store = MemoryStore()
    old = started(NOON - module.MINUTES_KEPT - 60_000)
    await old.write_to(store)
    await started().write_to(store)
    task = asyncio.create_task(expire_history(store, lambda: NOON))
    await asyncio.sleep(1)
    task.cancel()
    assert {at for at, _, _ in await sums(store)} == {NOON}
    assert len(await sums(store, HOUR)) == 2


@pytest.mark.virtual_time
async def test_the_last_seconds_are_written_when_the_process_stops() -> None:
    store = MemoryStore()
    history = History(Metrics())
    task = asyncio.create_task(record_periodically(store, history, lambda: NOON))
    await asyncio.sleep(0.5)
    history.metrics.event("track", "stored", 1, "acme", "website")
    task.cancel()
    await asyncio.wait([task])
    assert (await sums(store))[NOON, EVENTS, ("website", "track", "stored")] == 1


# ------------------------------------------------------------------------------------- refusals
def refusal(reason: str = "invalid_write_key", key: str = "ab12…") -> Refusal:
    return Refusal(reason=reason, status=401, route="track", key=key)


def test_equal_refusals_are_one_entry() -> None:
    refusals = Refusals()
    refusals.add(refusal(), 1)
    refusals.add(refusal("invalid_json", ""), 2)
    refusals.add(refusal(), 3)
    entries = refusals.entries()
    assert [(e["code"], e["count"], e["first"], e["at"]) for e in entries] == [
        ("invalid_write_key", 2, 1, 3),
        ("invalid_json", 1, 2, 2),
    ]


def test_the_number_of_entries_is_bounded() -> None:
    refusals = Refusals()
    for number in range(MAX_ENTRIES + 10):
        refusals.add(Refusal(reason="x", status=401, route=f"r{number}", key=f"{number}…"), number)
    entries = refusals.entries()
    assert len(entries) == MAX_ENTRIES
    assert entries[0]["at"] == MAX_ENTRIES + 9


def test_made_up_keys_do_not_hide_other_refusals() -> None:
    refusals = Refusals()
    refusals.add(refusal("invalid_json", ""), 0)
    for number in range(1000):
        refusals.add(refusal(key=f"{number}…"), number)
    # The first characters of two keys of the config can be equal.
    for key_id in ("website", "ios"):
        refusals.add(
            Refusal(reason="x", status=403, route="r", key="prod…", write_key_id=key_id), 1
        )
    entries = refusals.entries()
    assert len(entries) == 1 + 10 + 1 + 2
    assert [e["writeKeyId"] for e in entries[:2]] == ["ios", "website"]
    assert (entries[2]["key"], entries[2]["count"], entries[2]["at"]) == ("…", 990, 999)
    assert entries[-1]["code"] == "invalid_json"


async def recorded(store: Storage, history: History) -> Record:
    """Return the record of the refused requests, some seconds later."""
    await asyncio.sleep(3)
    record = await store.get_record(REFUSED_RECORD, "", history.process)
    assert record is not None
    return record


@pytest.mark.virtual_time
async def test_a_record_of_refusals_fits_into_the_limit() -> None:
    store = MemoryStore()
    history = History(Metrics())
    for number in range(MAX_ENTRIES):
        # NUL takes six bytes in JSON.
        text = "\x00" * 9999
        history.metrics.refused(
            Refusal(reason="x", status=401, route=f"r{number}", key=str(number), message=text)
        )
    task = asyncio.create_task(record_periodically(store, history, lambda: NOON))
    record = await recorded(store, history)
    task.cancel()
    kept = [entry["key"] for entry in orjson.loads(record.body)["rows"]]
    assert kept == [str(n) for n in range(MAX_ENTRIES - 1, MAX_ENTRIES - 1 - len(kept), -1)]
    assert len(kept) > 20


@each(
    "authorizations, keys, prefix",
    [
        *(([], [], ""), (["Basic c2VjcmV0LWtleTo="], [], "secr…")),
        *((["basic  c2VjcmV0LWtleTo= "], [], "secr…"), (["Basic not base64 at all"], [], "not …")),
        *((["Bearer c2VjcmV0LWtleTo="], [], "secr…"), (["Digest abc"], [], "")),
        *(([], ["", "secret-key"], "secr…"), ([], ["abcd"], "ab…"), ([], ["a"], "…")),
        (["Basic YWJjZDo="], [], "ab…"),
    ],
)
def test_only_the_first_characters_of_a_key_are_kept(
    authorizations: list[str], keys: list[str], prefix: str
) -> None:
    assert key_prefix(authorizations, keys) == prefix


async def test_refused_requests_are_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engage.keys.table.GAP_SECONDS", 0.01)
    metrics = Metrics()
    cors = '[cors]\norigins = ["https://shop.example"]\n'
    async with serving(tmp_path, metrics=metrics, config_extra=cors) as server:
        await server.track()
        await server.send("/v1/track", {"userId": "u"})  # a dead letter, so no refusal
        for _ in range(3):
            await server.send(
                "/v1/track", {"userId": "u", "event": "E"}, key="Basic d3Jvbmcta2V5Og=="
            )
        await server.send("/v1/track", {"userId": "u", "event": "E"}, key=None)
        await server.send("/v1/track", b"{")
        await server.send("/readyz", b"", key=None)  # it answers only GET
        await server.send(
            "/v1/track",
            method="OPTIONS",
            headers={"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"},
            key=None,
        )
        found = {(e["code"], e["route"], e["key"]): e for e in metrics.refusals.entries()}
    [found_key] = (key for code, _, key in found if code == "invalid_json")
    assert set(found) == {
        ("invalid_write_key", "track", "wron…"),
        ("missing_write_key", "track", ""),
        ("invalid_json", "track", found_key),
        ("origin_not_allowed", "track", ""),
        ("method_not_allowed", "readyz", ""),
    }
    assert found["invalid_write_key", "track", "wron…"]["count"] == 3
    assert "https://evil.example" in found["origin_not_allowed", "track", ""]["message"]
    entry = found["invalid_json", "track", found_key]
    assert (entry["workspace"], entry["writeKeyId"]) != ("", "")


@pytest.mark.virtual_time
async def test_refusals_are_written_once_a_second() -> None:
    store = MemoryStore()
    history = History(Metrics())
    history.metrics.refused(refusal())
    task = asyncio.create_task(record_periodically(store, history, lambda: NOON))
    record = await recorded(store, history)
    assert orjson.loads(record.body)["rows"][0]["count"] == 1
    for _ in range(100):
        history.metrics.refused(refusal())
    record = await recorded(store, history)
    assert record.version == 2
    assert orjson.loads(record.body)["rows"][0]["count"] == 101
    task.cancel()
    await asyncio.wait([task])
    assert (await sums(store))[NOON, REFUSED, ("?", "track", "invalid_write_key")] == 101
