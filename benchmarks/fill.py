# SPDX-License-Identifier: Apache-2.0
"""``python benchmarks/fill.py FOLDER --events 5000000``: fills a store with events.

The events are written through the storage plugin, in large writes and without HTTP, so the store
has exactly the format that the plugin writes. They are copies of one event that a server received,
with other message ids, spread evenly over three days.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import load
import orjson
import servers

from engage.api import Event, EventFilter, Status, StorageUnavailable, render_time
from engage.config import load as load_config
from engage.store.facade import Storage
from support.exports import registry
from support.server_process import KEY, config_text

#: Days over which the events are spread; the last one was received when the store is filled.
DAYS = 3
#: Events of one write, and writes at the same time.
_WRITE = 4000
_AT_ONCE = 4
#: How often a write is tried, with a second between two attempts.
_ATTEMPTS = 30
#: Events between two lines that report the progress.
_PROGRESS = 1_000_000


def open_config(config: Path) -> Storage:
    """Return the storage of a config file, which is not open yet."""
    return registry().make_storage(load_config(config))


def template() -> Event:
    """Return the benchmarks' event as a server stores it."""
    with tempfile.TemporaryDirectory(prefix="engage-bench-") as folder:
        with servers.engage(Path(folder)) as running:
            body = f"{load.HEAD}@id@{load.TAIL}"
            headers = {"Content-Type": "application/json"}
            url = f"{running.url}/v1/track"
            httpx.post(url, content=body, headers=headers, auth=(KEY, "")).raise_for_status()
        return asyncio.run(_first(Path(folder) / "engage.toml"))


async def _first(config: Path) -> Event:
    store = open_config(config)
    await store.open(create=False)
    try:
        return (await store.scan(EventFilter(), after=None, limit=1)).items[0]
    finally:
        await store.close()


def events(like: Event, count: int, now: int) -> Iterator[Event]:
    """Yield events in the order in which they were received.

    :param like: the event that they are copies of.
    :param count: how many.
    :param now: when the last one was received, in milliseconds since 1970 UTC.
    """
    document = {**like.document(), "messageId": "@id@", "receivedAt": "@at@"}
    body = orjson.dumps(document)
    start = now - DAYS * 24 * 3_600_000
    for number in range(count):
        at = start + (now - start) * (number + 1) // count
        name = f"fill-{number:012d}"
        yield Event(
            workspace_id=like.workspace_id,
            origin=like.origin,
            message_id=name,
            type=like.type,
            user_id=like.user_id,
            anonymous_id=like.anonymous_id,
            name=like.name,
            received_at=at,
            timestamp=like.timestamp,
            body=body.replace(b"@id@", name.encode()).replace(b"@at@", render_time(at).encode()),
        )


async def fill(store: Storage, count: int) -> None:
    """Write events to an open store that has none."""
    if not count:
        return
    pending: set[asyncio.Task[None]] = set()
    chunk: list[Event] = []
    begin = time.perf_counter()
    like = await asyncio.to_thread(template)
    made = events(like, count, int(time.time() * 1000))
    for number, event in enumerate(made, 1):
        chunk.append(event)
        if len(chunk) == _WRITE or number == count:
            # Writes are stored in the order in which they are begun.
            pending.add(asyncio.create_task(_write(store, chunk)))
            chunk = []
            if len(pending) >= _AT_ONCE or number == count:
                wait = asyncio.ALL_COMPLETED if number == count else asyncio.FIRST_COMPLETED
                done, pending = await asyncio.wait(pending, return_when=wait)
                for task in done:
                    task.result()
        if number % _PROGRESS == 0 or number == count:
            rate = number / (time.perf_counter() - begin)
            print(f"{number:,} of {count:,} events, {rate:,.0f}/s", file=sys.stderr, flush=True)


async def _write(store: Storage, chunk: list[Event]) -> None:
    for attempt in range(_ATTEMPTS):
        try:
            outcomes = await store.write(chunk)
        except StorageUnavailable as error:
            if attempt == _ATTEMPTS - 1:
                raise
            print(f"again in a second: {error}", file=sys.stderr, flush=True)
            await asyncio.sleep(1)
        else:
            # After an error, an event may have been stored already.
            assert all(one.status in (Status.STORED, Status.DUPLICATE) for one in outcomes)
            return


async def _fill_new(config: Path, count: int) -> None:
    store = open_config(config)
    await store.open(create=True)
    try:
        await fill(store, count)
    finally:
        await store.close()


def make_store(folder: Path, count: int) -> None:
    """Make a store with events in a new folder, which appears when it is complete."""
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True)
    config = partial / "engage.toml"
    config.write_text(config_text())
    try:
        asyncio.run(_fill_new(config, count))
        servers.free(partial / "engage.db")
        partial.rename(folder)
    finally:
        if partial.exists():
            servers.free(partial / "engage.db")
            shutil.rmtree(partial)


def main() -> int:
    """Make a store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--events", type=int, default=5_000_000)
    arguments = parser.parse_args()
    make_store(arguments.folder, arguments.events)
    return 0


if __name__ == "__main__":
    servers.run_main(main)
