# SPDX-License-Identifier: Apache-2.0
"""The promises of an :class:`~engage.store.facade.Storage`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from engage.api import (
    ERASED,
    EventFilter,
    Kind,
    Status,
    SubscriptionChange,
    Suppression,
)
from engage.store.facade import Storage
from engage.testing.factories import (
    AWKWARD,
    TIME,
    WORKSPACE,
    all_pages,
    event,
    identify,
    profile_of,
    user,
    visitor,
)
from engage.testing.storage.harness import Bench, on_open, on_store

#: Everyone, in :class:`EventFilter`.
ALL = EventFilter()
#: What an erased event leaves.
MARK = ERASED + b"0123:4567"


def change(name: str, user_id: str, **fields: Any) -> SubscriptionChange:
    """Return a change of the choice for the group ``news``."""
    values = {"choices": {"news": False}, "at": TIME, "how": "page", **fields}
    values.setdefault("subject", user(user_id))
    return SubscriptionChange(id=name, workspace_id=WORKSPACE, **values)


class ErasureTests:
    """``erase_events``, ``erase_profile``, ``links_to``, ``erase_choices``, ``reapply`` …."""

    @on_open
    async def test_an_erased_event_is_a_duplicate_of_nothing(self, store: Any) -> None:
        ann = event("m1", user_id="ann", at=1)
        others = [
            event("m2", user_id="bob", at=2),
            event("m1", user_id="ann", workspace="other", at=3),
        ]
        await store.write([ann, *others])
        assert await store.erase_events([ann], [MARK]) == 1
        assert await store.erase_events([ann, event("m9")], [ERASED, ERASED]) == 0
        assert await store.find(*ann.identity) is None
        assert await all_pages(store.scan, ALL) == others
        page = await store.recent(ALL, limit=9)
        if page is not None:
            assert sorted(one.identity for one in page.items) == sorted(
                other.identity for other in others
            )
        # A late retry, and another event with its message id.
        late = [ann, dataclasses.replace(ann, body=b'{"type":"track"}'), event("m3")]
        outcomes = await store.write(late)
        assert [outcome.status for outcome in outcomes] == [Status.DUPLICATE] * 2 + [Status.STORED]
        assert [outcome.stored for outcome in outcomes[:2]] == [MARK] * 2
        assert await store.find(*ann.identity) is None

    @on_store
    async def test_an_erased_identity_is_kept_by_other_processes_and_expires(
        self, bench: Bench
    ) -> None:
        store = await bench.open()
        events = [event(f"m{n}", user_id="ann", at=n) for n in range(5)]
        await store.write(events)
        marks = [MARK, b"", MARK + b"8"]
        await store.erase_events(events[:3], marks)
        await store.close()
        store = await bench.open()
        outcomes = await store.write(events)
        assert [outcome.stored for outcome in outcomes[:3]] == marks
        assert [outcome.stored in marks for outcome in outcomes[3:]] == [False] * 2
        if bench.subject.can("expire"):
            assert await store.expire(TIME + 2, limit=9) == 2
            outcomes = await store.write(events)
            stored = [outcome.status is Status.STORED for outcome in outcomes]
            assert stored == [True, True, False, False, False]

    @on_open
    async def test_a_filter_has_ids(self, store: Any) -> None:
        events = [
            event("1", user_id="ann", anonymous_id="a"),
            event("2", anonymous_id="a"),
            event("3", user_id="bob", anonymous_id="a"),
            event("4", anonymous_id="b"),
        ]
        await store.write(events)
        for ids, expected in (({"ann"}, "1"), ({"a", "ann"}, "12"), ({"a"}, "2"), (set(), "")):
            wanted = EventFilter(workspace_id=WORKSPACE, ids=ids)
            found = [one for one in await all_pages(store.scan, wanted) if wanted.matches(one)]
            assert "".join(one.message_id for one in found) == expected

    @on_open
    async def test_an_erased_user_has_nothing_and_others_keep_all(self, store: Any) -> None:
        await store.write(
            [
                identify("1", "ann", traits={"email": "ann@x.org", "plan": "a"}),
                identify("2", "bob", traits={"email": "bob@x.org"}),
                event("3", user_id="ann", anonymous_id="a"),
                event("4", type="identify", anonymous_id="a", traits={"city": "Ulm"}),
                event("5", type="group", user_id="ann", groupId="g", traits={"size": 1}),
            ]
        )
        assert await store.erase_profile(WORKSPACE, Kind.USER, "ann")
        assert not await store.erase_profile(WORKSPACE, Kind.USER, "ann")
        assert not await store.erase_profile("other", Kind.USER, "bob")
        assert await store.profile(WORKSPACE, "ann") is None
        assert await store.find_users(WORKSPACE, "email", ["ann@x.org"]) == {}
        assert await store.find_users(WORKSPACE, "email", ["bob@x.org"]) == {"bob@x.org": ["bob"]}
        visitor = await store.visitor(WORKSPACE, "a")
        assert visitor.user_id is None
        assert visitor.traits == {"city": "Ulm"}
        assert await store.erase_profile(WORKSPACE, Kind.VISITOR, "a")
        assert await store.visitor(WORKSPACE, "a") is None
        assert [group.group_id for group in await all_pages(store.scan_groups, WORKSPACE)] == ["g"]

    @on_store
    async def test_what_happens_later_makes_a_new_user(self, bench: Bench) -> None:
        store = await bench.open(write_timeout=3.0)
        await store.write(
            [
                identify("1", "ann", traits={"email": "ann@x.org", "plan": "a"}),
                event("2", user_id="ann", anonymous_id="a"),
            ]
        )
        await store.erase_profile(WORKSPACE, Kind.USER, "ann")
        await store.settle()
        later = [
            identify("3", "ann", 9, traits={"email": "ann@x.org"}),
            event("4", user_id="ann", anonymous_id="a", at=9),
        ]
        await store.write(later)
        found = await profile_of(store, "ann")
        assert (found.traits, found.anonymous_ids) == ({"email": "ann@x.org"}, ["a"])
        assert found.created_at == TIME + 9
        assert await store.links_to(WORKSPACE, "a") == [("ann", TIME + 9)]
        assert await store.find_users(WORKSPACE, "email", ["ann@x.org"]) == {"ann@x.org": ["ann"]}

    @on_store
    async def test_another_process_forgets_what_it_remembered(self, bench: Bench) -> None:
        if not bench.subject.can("several-processes"):
            pytest.skip("one process")
        one: Any = await bench.open()
        two: Any = await bench.open(write_timeout=3.0)
        await one.write(
            [
                identify("1", "ann", traits={"email": "ann@x.org"}),
                event("2", user_id="ann", anonymous_id="a"),
            ]
        )
        await two.erase_profile(WORKSPACE, Kind.USER, "ann")
        await two.settle()
        await one.write(
            [
                identify("3", "ann", 9, traits={"email": "ann@x.org"}),
                event("4", user_id="ann", anonymous_id="a", at=9),
            ]
        )
        assert (await two.profile(WORKSPACE, "ann")).anonymous_ids == ["a"]
        assert await two.links_to(WORKSPACE, "a") == [("ann", TIME + 9)]
        users = await two.find_users(WORKSPACE, "email", ["ann@x.org"])
        assert users == {"ann@x.org": ["ann"]}

    @on_open
    async def test_changes_are_applied_again(self, store: Any) -> None:
        events = [
            identify("1", "ann", traits={"email": "ann@x.org"}),
            event("2", user_id="ann", anonymous_id="a", at=3),
            event("3", type="identify", anonymous_id="a", traits={"city": "Ulm"}),
        ]
        await store.write(events)
        before = await store.profile(WORKSPACE, "ann")
        await store.erase_profile(WORKSPACE, Kind.USER, "ann")
        await store.erase_profile(WORKSPACE, Kind.VISITOR, "a")
        for _ in range(2):
            await store.reapply(events)
            assert await store.profile(WORKSPACE, "ann") == before
        assert await store.find_users(WORKSPACE, "email", ["ann@x.org"]) == {"ann@x.org": ["ann"]}
        await store.reapply([])

    @on_open
    async def test_links_to_an_anonymous_id_are_in_the_order_of_receipt(self, store: Any) -> None:
        await store.write(
            [
                event("1", user_id="ann", anonymous_id="a", at=1, received=5),
                event("2", user_id="bob", anonymous_id="a", at=2, received=4),
                event("3", user_id="cyd", anonymous_id="a", at=3, received=6),
                event("4", user_id="cyd", anonymous_id="b", at=3, received=6),
            ]
        )
        found = await store.links_to(WORKSPACE, "a")
        assert found == [("bob", TIME + 4), ("ann", TIME + 5), ("cyd", TIME + 6)]
        alias: dict[str, Any] = {"previousId": "a", "linked": False}
        undo = event("5", type="alias", user_id="ann", at=7, origin="operator", **alias)
        await store.write([undo])
        assert [user for user, _ in await store.links_to(WORKSPACE, "a")] == ["bob", "cyd"]
        assert await store.links_to("other", "a") == []
        # These users do not exist: nothing is known of them.
        found = [await store.linked_to(WORKSPACE, name) for name in ("ann", "bob", "cyd")]
        assert [sorted(names) for names in found] == [[], ["a"], ["a", "b"]]
        assert await store.linked_to("other", "bob") == []

    @on_open
    async def test_choices_are_erased_and_records_get_a_pseudonym(self, store: Any) -> None:
        if Storage not in type(store).__mro__:
            pytest.skip("this storage keeps no choices")
        source = {"secret": "12345678", "user_agent": "Firefox", "address": "192.0.2.1"}
        await store.apply(change("c1", "ann", **source))
        await store.apply(change("c2", "bob", **source))
        await store.apply(change("c3", "ann", **source))
        await store.apply(change("c4", "", subject=visitor("ann")))
        before = list(await all_pages(store.history, WORKSPACE, None))
        assert await store.erase_choices(WORKSPACE, user("ann"), "x-1") == (1, 1)
        assert await store.erase_choices(WORKSPACE, user("ann"), "x-1") == (0, 0)
        assert await store.state(WORKSPACE, user("ann")) == {}
        assert await store.state(WORKSPACE, user("bob")) == {"news": False}
        assert await store.state(WORKSPACE, visitor("ann")) == {"news": False}
        records = await all_pages(store.history, WORKSPACE, None)
        none: Any = {"subject": user("x-1"), "secret": "", "user_agent": "", "address": ""}
        none["change_id"] = records[0].change_id
        assert records == [dataclasses.replace(before[0], **none), *before[1:]]
        assert none["change_id"] != "c1", "the id of a change can be computed from the person's"
        assert await all_pages(store.history, WORKSPACE, user("ann")) == []
        # The changes are known: a link that is opened again does nothing.
        await store.apply(change("c1", "ann"))
        await store.apply(change("c3", "ann"))
        assert await store.state(WORKSPACE, user("ann")) == {}
        assert await store.erase_choices(WORKSPACE, visitor("ann"), "x-2") == (1, 1)
        (record,) = await all_pages(store.history, WORKSPACE, visitor("x-2"))
        assert (record.secret, record.change_id == "c4") == ("", False)
        # A choice made it exist.
        await store.erase_profile(WORKSPACE, Kind.USER, "ann")
        assert await store.profile(WORKSPACE, "ann") is None

    @on_open
    async def test_suppressions_of_an_address_are_erased(self, store: Any) -> None:
        if Storage not in type(store).__mro__:
            pytest.skip("this storage keeps no suppressions")
        rows = [
            Suppression(
                workspace_id=WORKSPACE, channel=channel, address=address, reason="bounce", at=TIME
            )
            for channel, address in (("email", "a@b.c"), ("email", "a@b.co"), ("sms", "a@b.c"))
        ]
        await store.suppress(rows)
        assert await store.erase_suppressions(WORKSPACE, [("email", "a@b.c")]) == 1
        assert await store.erase_suppressions(WORKSPACE, [("email", "a@b.c")]) == 0
        assert await store.erase_suppressions(WORKSPACE, []) == 0
        suppressions = await all_pages(store.scan_suppressions, WORKSPACE)
        assert {(suppression.channel, suppression.address) for suppression in suppressions} == {
            ("email", "a@b.co"),
            ("sms", "a@b.c"),
        }

    @on_open
    async def test_similar_ids_are_told_apart(self, store: Any) -> None:
        names = [name for name in AWKWARD if len(name) < 99]
        await store.write(
            [identify(f"m{n}", name, traits={"n": n}) for n, name in enumerate(names)]
        )
        known = {one.user_id for one in await all_pages(store.scan_users, WORKSPACE)}
        for name in sorted(known)[::2]:
            assert await store.erase_profile(WORKSPACE, Kind.USER, name)
        left = {one.user_id for one in await all_pages(store.scan_users, WORKSPACE)}
        assert left == set(sorted(known)[1::2])
