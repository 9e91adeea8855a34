# SPDX-License-Identifier: Apache-2.0
"""Creating the tables, their version, and which store they are."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final

from engage.api import StorageIncompatible, StorageMissing, StorageUnavailable
from engage.store.events import STORE
from engage.store.facade import TABLES
from engage.store.tables import Put

from .steps import Run
from .tables import definitions, hash_of

if TYPE_CHECKING:
    from .connections import Connections

#: The version of the tables, and the oldest one that can read them.
VERSION: Final = 1
MIN_READER: Final = 1
#: Tables are another store in another cluster, and after ``pg_restore``.
_HOME: Final = "SELECT system_identifier || ':' || 'events'::regclass::oid FROM pg_control_system()"
_VALUES: Final = "SELECT to_jsonb(s) ->> 'name', to_jsonb(s) ->> 'value' FROM store s"


async def prepare(pool: Connections, db: Any, *, create: bool, had_store: bool) -> bool:
    """Create the tables if there are none, or check that this version can read them.

    :return: whether they are the store that was written last. One that was restored becomes another
        one with ``create``.
    """
    await db.execute(f"BEGIN; SELECT pg_advisory_xact_lock({pool.lock}, -1)")
    values: dict[str, int] = {}
    if await db.fetchval("SELECT to_regclass('store') IS NOT NULL"):
        pairs = [(name, value) for name, value in await db.fetch(_VALUES) if name and value]
        values = {name: int(value) for name, value in pairs if value.isdecimal()}
        if values.get("min_reader", VERSION + 1) > VERSION:
            made = f"store version {values.get('version')}; this is version {VERSION}"
            whose = f"the schema {pool.schema} is not one of engage, or a newer version made it"
            raise StorageIncompatible(f"{pool.name}: {whose} ({made})")
    elif had_store:
        raise StorageUnavailable(f"{pool.name}: the tables were there, and may come back")
    elif not create:
        raise StorageMissing(f"{pool.name}: there is no store in the schema {pool.schema}")
    else:
        if not await db.fetchval("SELECT to_regnamespace($1) IS NOT NULL", pool.schema):
            await db.execute(f'CREATE SCHEMA "{pool.schema}"')
        await db.execute(definitions(TABLES.values()))
    home = int.from_bytes(hash_of([await db.fetchval(_HOME)])[:7])
    if create and values.get("home") != home:
        values = {"version": VERSION, "min_reader": MIN_READER, **values}
        values |= {"home": home, "incarnation": secrets.randbits(62)}
        await Run(db).execute(Put(STORE, [*values.items()]))
    await db.execute("COMMIT")
    return values.get("home") == home
