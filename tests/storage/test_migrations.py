# SPDX-License-Identifier: Apache-2.0
"""Stores that earlier versions of engage made are brought up to date by ``engage serve``, in place.

This is about all storages; ``tests/plugins/sqlite/test_migration.py`` is about SQLite's own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engage.api import (
    CountStore,
    RecordStore,
)
from engage.testing.factories import TIME, identify, letter, store_all
from engage_plugins.mongo import schema as mongo_schema
from engage_plugins.sqlite import schema as sqlite_schema
from support.earlier_stores import EMAIL, Earlier, has_everything


@pytest.fixture(params=["sqlite", pytest.param("mongo", marks=pytest.mark.mongo)])
def version_1(request: pytest.FixtureRequest, tmp_path: Path) -> Earlier:
    return Earlier(tmp_path, request.param, 1)


@pytest.fixture(
    params=[
        pytest.param((kind, version), id=f"{kind}-{version}", marks=marks)
        for kind, versions, marks in (
            ("sqlite", (1, 2, 3, 4), ()),
            ("mongo", (1, 2), pytest.mark.mongo),
        )
        for version in versions
    ]
)
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> Earlier:
    """A store of each version before this one."""
    return Earlier(tmp_path, *request.param)


async def test_a_server_brings_a_store_up_to_date(earlier: Earlier) -> None:
    assert earlier.version() == earlier.made
    for _ in range(2):
        async with earlier.opened(create=True) as store:
            await has_everything(store)
        assert (
            earlier.version()
            == {"sqlite": sqlite_schema, "mongo": mongo_schema}[earlier.kind].VERSION
        )


async def test_claims_before_they_were_recorded_are_the_oldest(version_1: Earlier) -> None:
    """The users who had an address then come before all later ones."""
    async with version_1.opened(create=True) as store:
        email = {"email": EMAIL}
        await store_all(store, identify("f", "0", -(10**12), received=10**9, traits=email))
        # Their claims stay when they have another value for a while, too.
        await store_all(store, identify("7", "ada", 10**9, traits={"email": "new@example.com"}))
        assert await store.find_users("acme", "email", [EMAIL]) == {EMAIL: ["forged", "0"]}
        await store_all(store, identify("8", "ada", 10**9 + 1, traits=email))
        assert await store.find_users("acme", "email", [EMAIL]) == {EMAIL: ["ada", "forged", "0"]}


async def test_other_commands_read_an_earlier_store_and_leave_it_as_it_is(
    earlier: Earlier,
) -> None:
    async with earlier.opened(create=False) as store:
        await has_everything(store)
        await store.check()
        if isinstance(store, RecordStore):
            assert await store.get_record("key", "acme", "k") is None
            assert await store.records_version("key") == 0
            assert list((await store.list_records(None, limit=9)).items) == []
        if isinstance(store, CountStore):
            assert list((await store.counts(60, since=0, until=TIME, limit=9)).items) == []
            assert list((await store.scan_counts(after=None, limit=9)).items) == []
        recent = await store.recent_dead_letters(None, limit=9)
        if recent is not None:
            assert list(recent.items) == [letter("bad")]
        assert await store.dead_letter("acme", "bad") == letter("bad")
    assert earlier.version() == earlier.made


async def test_a_version_between_gets_only_what_is_missing(version_1: Earlier) -> None:
    async with version_1.opened(create=True):
        pass
    # A later version that this one can read: nothing is done to it.
    version_1.set_version(1000)
    async with version_1.opened(create=True) as store:
        await has_everything(store)
    assert version_1.version() == 1000


def test_migrations_are_numbered_up_to_the_version() -> None:
    for schema in (sqlite_schema, mongo_schema):
        numbers = list(schema.MIGRATIONS)
        assert numbers == list(range(2, schema.VERSION + 1))
