# SPDX-License-Identifier: Apache-2.0
"""A store with a person in every part of it, and what the store has of the person."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engage.api import EventFilter, StorageContext, Suppression
from engage.audit import Actor, record_audit
from engage.config import Config, Erasures, StorageConfig, SubscriptionGroup, Workspace, WriteKey
from engage.people.addresses import named_addresses
from engage.reading.export import KINDS, render
from engage.testing import MemoryStore
from engage.testing.factories import TIME, all_pages, event, identify, letter, visitor
from support import mongo
from support.rules.erasures import change
from support.sqlite import make

ACTOR = Actor(who="root", origin="a test")
KEY = "0123456789abcdef" * 2
#: The addresses of the person, as an operator names them.
ADDRESSES = frozenset(named_addresses(["Ann@x.org", "+49 (123)"]))
#: All texts by which the person is known.
TRACES = ("ann", "ANN@x.org", "ann@x.org", "+49123", "Ulm", "a1", "192.0.2.7")


def config(folder: Path, *, key: str | None = KEY, write_timeout: float = 0.01) -> Config:
    """Return a config; an erasure waits for twice the timeout at most."""
    news = SubscriptionGroup(id="news", name="News", channel="email", type="opt_out")
    keys = (WriteKey(id="website", key="k"), WriteKey(id="backend", kind="server", sha256="0" * 64))
    return Config(
        path=folder / "engage.toml",
        base_dir=folder,
        storage=StorageConfig(write_timeout=write_timeout),
        erasures=Erasures(key=key),
        workspaces=(
            Workspace(id="acme", name="Acme", subscription_groups=(news,), write_keys=keys),
            Workspace(id="other", name="Other"),
        ),
    )


async def fill(store: Any) -> None:
    """Store the user ``ann`` with the visitor ``a1``, which an operator linked, and ``bob``, who
    later used the browser of ``a1`` and was the first to use that of ``b1``; and another ``ann`` in
    another workspace."""
    decision: Any = {"previousId": "a1", "linked": True}
    await store.write(
        [
            identify("m1", "ann", 1, traits={"email": "ANN@x.org", "phone": "+49 123"}),
            event("m2", type="alias", user_id="ann", at=2, origin="operator", **decision),
            event("m3", anonymous_id="a1", at=1),
            event("m4", type="identify", anonymous_id="a1", at=1, traits={"city": "Ulm"}),
            event("m5", user_id="bob", anonymous_id="b1", at=1),
            event("m6", user_id="ann", anonymous_id="b1", at=2),
            event("m7", type="identify", anonymous_id="b1", at=1, traits={"city": "Bonn"}),
            event("m8", user_id="bob", anonymous_id="a1", at=3),
            identify("m9", "bob", 2, traits={"email": "bob@x.org"}),
            event("m10", type="group", user_id="ann", groupId="g", at=4),
            event("m11", anonymous_id="email:ann@x.org", origin="sendgrid", at=4),
            event("m12", anonymous_id="a1", at=4),
            identify("m13", "ann", 4, workspace="other", traits={"email": "zoe@x.org"}),
        ]
    )
    source = {"secret": "12345678", "user_agent": "Firefox", "address": "192.0.2.7"}
    await store.apply(change("c1", "ann", **source))
    await store.apply(change("c2", "", subject=visitor("a1"), choices={"news": True}, **source))
    await store.apply(change("c3", "bob"))
    stop = dataclasses.replace(_bounce("+49123"), channel="whatsapp", reason="stop")
    await store.suppress([_bounce("ann@x.org"), _bounce("bob@x.org"), stop])
    await store.put(
        [
            letter("l1", user_id="ann"),
            letter("l2", user_id=None, anonymous_id="a1"),
            letter("l3", user_id=None, origin="sendgrid", item=b'[{"email":"Ann@x.org"}]'),
            letter("l4", user_id="bob", item=b'{"friend":"bob@x.org"}'),
        ]
    )
    about = {"workspace": "acme", "user": "ann", "anonymousId": "a1"}
    await record_audit(store, ACTOR, "anonymous-id-unlinked", about, now=TIME)


MONGO = pytest.param("mongo", marks=[pytest.mark.mongo, pytest.mark.long])

Test = Callable[[Any, Path], Awaitable[None]]


@contextlib.asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[Any]:
    context = StorageContext(base_dir=folder, identifiers={"acme": ["email"]}, erasures_key=KEY)
    one: Any = MemoryStore(None, context) if kind == "memory" else make(folder, erasures_key=KEY)
    if kind == "mongo":
        url = mongo.shared(mongo.kinds()[0]).url()
        one = mongo.make_store(folder, url, write_timeout=5.0, identifiers={"acme": ["email"]})
    await one.open(create=True)
    try:
        yield one
    finally:
        await one.close()


def on_each(test: Test) -> Callable[[str, Path], Awaitable[None]]:
    """Make ``async def test_x(store, tmp_path)`` a test of each kind of store."""

    @pytest.mark.parametrize("kind", ["memory", "sqlite", MONGO])
    async def run(kind: str, tmp_path: Path) -> None:
        async with opened(kind, tmp_path) as store:
            await test(store, tmp_path)

    run.__name__ = test.__name__
    return run


def _bounce(address: str) -> Suppression:
    return Suppression(
        workspace_id="acme", channel="email", address=address, reason="bounce", at=TIME
    )


async def lines(store: Any, workspace: str = "acme") -> list[bytes]:
    """Return everything in a workspace as JSON, and all records."""
    found = []
    for kind, about in KINDS.items():
        first: Any = EventFilter(workspace_id=workspace) if kind == "events" else workspace
        scan = getattr(store, about.scan)
        if kind == "subscription-history":
            items = await all_pages(scan, first, None)
        else:
            items = await all_pages(scan, first)
        found += [kind.encode() + b" " + render(kind, item).json for item in items]
    found += [
        b"%s %s" % (record.kind.encode(), record.body)
        for record in await all_pages(store.list_records, None)
    ]
    return found


async def traces(store: Any) -> list[bytes]:
    """Return the lines that name the person, without those of others that name the browser."""
    names = [f'"{text}"'.encode() for text in TRACES] + [b"ann@x.org"]
    return [
        line
        for line in await lines(store)
        if any(name in line for name in names) and b'"bob"' not in line
    ]
