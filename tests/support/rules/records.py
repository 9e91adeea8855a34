# SPDX-License-Identifier: Apache-2.0
"""The promises of a :class:`~engage.store.facade.Storage`."""

from __future__ import annotations

import asyncio
import functools
import itertools
from typing import Any

import pytest

from engage.api import MAX_RECORD_BYTES, Record
from engage.testing.factories import AWKWARD, TIME, all_pages, record
from engage.testing.storage.harness import Bench, on_open, on_store


def _key(one: Record) -> tuple[str, str, str]:
    return (one.kind, one.workspace_id, one.id)


class RecordTests:
    """``put_record``, ``get_record``, ``list_records``, ``records_version`` and deletion."""

    @on_store
    async def test_a_record_is_returned_unchanged(self, bench: Bench) -> None:
        store = await bench.open()
        written = [
            record("plain"),
            record("server", workspace_id=""),
            record("bytes", body='{"\\u0000":"\u202e😀 $a.b","n":9007199254740993}'.encode()),
            record("times", at=0),
            record("later", at=253_402_300_799_999),
        ]
        for one in written:
            assert await store.put_record(one) == 1
        await store.close()
        store = await bench.open()
        for one in written:
            found = await store.get_record(*_key(one))
            assert found == record(one.id, one.workspace_id, body=one.body, at=one.at, version=1)
        assert await store.get_record("key", "acme", "nobody") is None
        assert await store.get_record("audit", "acme", "plain") is None
        assert await store.get_record("key", "other", "plain") is None

    @on_open
    async def test_the_version_of_a_record_ascends(self, store: Any) -> None:
        # The version of the written record is ignored.
        for version in (1, 2, 3):
            assert await store.put_record(record("a", version=7)) == version
        assert await store.put_record(record("a", body=b'{"n":4}', at=TIME + 4)) == 4
        found = await store.get_record("key", "acme", "a")
        assert found == record("a", body=b'{"n":4}', at=TIME + 4, version=4)

    @on_open
    async def test_a_record_is_written_if_it_has_the_expected_version(self, store: Any) -> None:
        assert await store.put_record(record("a", body=b'{"n":1}'), expected_version=1) is None
        assert await store.get_record("key", "acme", "a") is None
        assert await store.put_record(record("a", body=b'{"n":1}'), expected_version=0) == 1
        for wrong in (0, 2, 99):
            other = record("a", body=b'{"n":9}', at=TIME + 9)
            assert await store.put_record(other, expected_version=wrong) is None
        assert await store.get_record("key", "acme", "a") == record("a", body=b'{"n":1}', version=1)
        assert await store.put_record(record("a", body=b'{"n":2}'), expected_version=1) == 2
        assert await store.put_record(record("a", body=b'{"n":2}'), expected_version=1) is None
        assert await store.put_record(record("b"), expected_version=0) == 1
        # A record that was deleted is not there.
        assert await store.delete_record("key", "acme", "a")
        assert await store.put_record(record("a"), expected_version=2) is None
        assert await store.put_record(record("a"), expected_version=0) == 1

    @on_store
    async def test_one_of_many_callers_writes_a_version(self, bench: Bench) -> None:
        bench.require("atomic-updates")
        stores = [await bench.open() for _ in range(3)]
        for version in range(4):
            written = await asyncio.gather(
                *(
                    store.put_record(
                        record("a", body=b'{"n":%d}' % number), expected_version=version
                    )
                    for number, store in enumerate(stores * 3)
                )
            )
            assert sorted(written, key=str) == [version + 1, *[None] * 8]
            winner = next(number for number, one in enumerate(written) if one is not None)
            found = await stores[0].get_record("key", "acme", "a")
            assert found == record("a", body=b'{"n":%d}' % winner, version=version + 1)

    @on_open
    async def test_a_record_has_limits(self, store: Any) -> None:
        largest = b'{"x":"%s"}' % (b"x" * (MAX_RECORD_BYTES - 8))
        assert len(largest) == MAX_RECORD_BYTES
        for fine in (
            record("body", body=largest),
            record("x" * 256),
            record("😀" * 256),
            record("a", kind="k" * 32),
        ):
            assert await store.put_record(fine) == 1
            found = await store.get_record(*_key(fine))
            assert found is not None
            assert found.body == fine.body
        for wrong in (
            record("large", body=largest + b" "),
            record("x" * 257),
            record("b", kind="k" * 33),
            record("\ud800"),
            record("c", workspace_id="\udfff"),
        ):
            with pytest.raises(ValueError, match=r"."):
                await store.put_record(wrong)
            assert await store.get_record(*_key(wrong)) is None
        assert len(await all_pages(store.list_records, None)) == 4

    @on_open
    async def test_similar_ids_of_records_are_different(self, store: Any) -> None:
        names = [(workspace, one) for workspace in ("", "a", "a:") for one in AWKWARD]
        for number, (workspace, one) in enumerate(names):
            body = b'{"n":%d}' % number
            assert await store.put_record(record(one, workspace, body=body), expected_version=0)
        for number, (workspace, one) in enumerate(names):
            found = await store.get_record("key", workspace, one)
            assert found is not None
            assert (found.workspace_id, found.id) == (workspace, one)
            assert found.body == b'{"n":%d}' % number
        assert await store.delete_record("key", "a", "a\x00")
        assert not await store.delete_record("key", "a", "a\x00")
        assert len(await all_pages(store.list_records, "key")) == len(names) - 1

    @on_store
    async def test_records_are_listed_in_the_order_of_code_points(self, bench: Bench) -> None:
        store = await bench.open()
        kinds, workspaces = ("audit", "key", "key-override"), ("", "acme", "acme-")
        names = [*AWKWARD, "\ue000", "\U00010000", "z"]
        if not bench.subject.can("code-point-order"):
            names = [name for name in names if max(name) < "\ud800"]
        written = [
            record(one, workspace, kind=kind)
            for number, (kind, workspace, one) in enumerate(
                itertools.product(kinds, workspaces, names)
            )
            if number % 4
        ]
        for one in sorted(written, key=lambda one: (len(one.id), _key(one))):
            await store.put_record(one)
        for kind, workspace in itertools.product((None, *kinds, "k"), (None, *workspaces, "acm")):
            expected = sorted(
                _key(one)
                for one in written
                if kind in (None, one.kind) and workspace in (None, one.workspace_id)
            )
            for reverse, limit in itertools.product((False, True), (7, 1000)):
                read = functools.partial(store.list_records, kind, workspace, reverse=reverse)
                found = await all_pages(read, limit=limit)
                assert [_key(one) for one in found] == expected[:: -1 if reverse else 1]

    @on_store
    async def test_a_list_of_records_continues_after_its_record_was_deleted(
        self, bench: Bench
    ) -> None:
        store = await bench.open()
        for name in "abcdef":
            await store.put_record(record(name))
        page = await store.list_records("key", limit=3)
        back = await store.list_records("key", limit=2, reverse=True)
        for name in "cde":
            assert await store.delete_record("key", "acme", name)
        await store.close()
        store = await bench.open()
        rest = await all_pages(store.list_records, "key", after=page.cursor)
        assert [one.id for one in rest] == ["f"]
        backwards = functools.partial(store.list_records, "key", reverse=True)
        rest = await all_pages(backwards, after=back.cursor)
        assert [one.id for one in rest] == ["b", "a"]

    @on_store
    async def test_the_version_of_a_kind_grows_with_each_change(self, bench: Bench) -> None:
        store = await bench.open()
        versions = [await store.records_version("key")]

        async def grew() -> bool:
            versions.append(await store.records_version("key"))
            return bool(versions[-1] > versions[-2])

        await store.put_record(record("a"))
        assert await grew()
        await store.put_record(record("a"))
        assert await grew()
        await store.put_record(record("b", "", at=TIME - 1), expected_version=0)
        assert await grew()
        assert await store.delete_record("key", "acme", "a")
        assert await grew()
        assert await store.expire_records("key", TIME, limit=9) == 1
        assert await grew()
        # A record that is there again has been written.
        await store.put_record(record("a"))
        assert await grew()
        other = await bench.open()
        await other.put_record(record("c", kind="audit"))
        await other.put_record(record("c"))
        assert await grew()

    @on_open
    async def test_old_records_expire(self, store: Any) -> None:
        for number in range(6):
            await store.put_record(record(f"{number}", at=TIME + number))
        await store.put_record(record("0", kind="audit"))
        # The time of the last write counts.
        await store.put_record(record("1", at=TIME + 9))
        assert await store.expire_records("nothing", TIME + 9, limit=9) == 0
        assert await store.expire_records("key", TIME + 4, limit=2) == 2
        assert await store.expire_records("key", TIME + 4, limit=9) == 1
        assert await store.expire_records("key", TIME + 4, limit=9) == 0
        records = await all_pages(store.list_records, None)
        assert [(one.kind, one.id) for one in records] == [
            ("audit", "0"),
            ("key", "1"),
            ("key", "4"),
            ("key", "5"),
        ]
