# SPDX-License-Identifier: Apache-2.0
"""The promises of a :class:`~engage.store.facade.Storage`."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from engage.store.facade import Storage
from engage.testing.factories import (
    AWKWARD,
    TIME,
    WORKSPACE,
    all_pages,
    change,
    unproven,
    user,
    visitor,
)
from engage.testing.storage.harness import Bench, on_open, on_store


def _summary(record: Any) -> tuple[Any, ...]:
    return (
        record.change_id,
        record.user_id,
        record.group_id,
        record.before,
        record.after,
        record.at - TIME,
    )


class SubscriptionTests:
    """``apply``, ``state``, ``scan_subscriptions``, ``history``."""

    @on_open
    async def test_choices_are_stored_with_their_history(self, store: Any) -> None:
        assert dict(await store.state(WORKSPACE, user("u"))) == {}
        assert dict(await store.apply(change("1", at=1, a=True, b=False))) == {
            "a": True,
            "b": False,
        }
        after = {"a": False, "b": False, "c": True}
        assert dict(await store.apply(change("2", at=2, a=False, c=True, b=False))) == after
        assert dict(await store.state(WORKSPACE, user("u"))) == after
        records = await all_pages(store.history, WORKSPACE, user("u"))
        assert sorted(_summary(record) for record in records[:2]) == [
            ("1", "u", "a", None, True, 1),
            ("1", "u", "b", None, False, 1),
        ]
        assert sorted(_summary(record) for record in records[2:]) == [
            ("2", "u", "a", True, False, 2),
            ("2", "u", "c", None, True, 2),
        ]
        assert {record.how for record in records} == {"api"}

    @on_open
    async def test_a_choice_that_already_holds_has_no_other_record(self, store: Any) -> None:
        """It becomes later nevertheless: an import of an older choice must not undo it."""
        await store.apply(change("1", at=1, a=True))
        await store.apply(change("2", at=2, a=True))
        await store.apply(change("1", at=9, a=True))
        (state,) = await all_pages(store.scan_subscriptions, None)
        assert (state.updated_at, state.change_id) == (TIME + 2, "2")
        assert len(await all_pages(store.history, None, None)) == 1
        # Also by another clock.
        await store.apply(change("3", at=0, a=False))
        (state,) = await all_pages(store.scan_subscriptions, None)
        assert (state.updated_at, state.change_id) == (TIME + 3, "3")

    @on_open
    async def test_a_change_is_applied_once_for_each_id(self, store: Any) -> None:
        await store.apply(change("1", a=True))
        # This change has no effect. Repeated after the next one, it must not undo that one.
        await store.apply(change("2", a=True))
        await store.apply(change("3", a=False))
        for name in ("1", "2", "3"):
            again = change(name, at=9, a=True, b=True)
            assert dict(await store.apply(again)) == {"a": False}
        assert len(await all_pages(store.history, None, None)) == 2
        # The same id in another workspace is another change.
        other = change("1", workspace="other", a=True)
        assert dict(await store.apply(other)) == {"a": True}

    @on_open
    async def test_recent_changes_without_effect_are_remembered(self, store: Any) -> None:
        await store.apply(change("on", a=True))
        for number in range(40):
            await store.apply(change(f"idle {number}", a=True))
        await store.apply(change("off", a=False))
        for name in ("on", *(f"idle {number}" for number in range(30, 40)), "off"):
            assert dict(await store.apply(change(name, a=True))) == {"a": False}
        assert dict(await store.apply(change("new", a=True))) == {"a": True}

    @on_open
    async def test_a_dated_change_never_undoes_a_later_choice(self, store: Any) -> None:
        await store.apply(change("1", at=5, a=True, b=True))
        after = {"a": True, "b": True, "c": False}
        old = change("2", at=5, dated=True, a=False, b=True, c=False)
        assert dict(await store.apply(old)) == after
        assert dict(await store.apply(change("3", at=4, dated=True, a=False))) == after
        states = await all_pages(store.scan_subscriptions, None)
        a, b, c = sorted(states, key=lambda state: state.group_id)
        assert {(one.updated_at - TIME, one.user_id) for one in (a, b, c)} == {(5, "u")}
        assert (a.change_id, b.change_id, c.change_id) == ("1", "1", "2")
        # A later one is a change like any other, at its own time.
        assert (await store.apply(change("4", at=9, dated=True, a=False)))["a"] is False
        records = await all_pages(store.history, None, None)
        assert sorted(_summary(record) for record in records) == [
            ("1", "u", "a", None, True, 5),
            ("1", "u", "b", None, True, 5),
            ("2", "u", "c", None, False, 5),
            ("4", "u", "a", True, False, 9),
        ]

    @on_open
    async def test_many_changes_are_applied_at_once(self, store: Any) -> None:
        changes = [
            change(str(number), user_id=f"u{number % 30}", at=number, a=number % 90 < 60)
            for number in range(90)
        ]
        found = await store.apply_all(changes)
        assert [dict(one) for one in found] == [dict(one.choices) for one in changes]
        assert await store.apply_all([]) == []
        # The changes of one id in their order, and each once.
        await store.apply_all(changes)
        states = await all_pages(store.scan_subscriptions, WORKSPACE)
        assert {(state.user_id, state.subscribed) for state in states} == {
            (f"u{number}", False) for number in range(30)
        }
        assert len(await all_pages(store.history, None, None)) == 60

    @on_open
    async def test_a_record_says_from_where_the_change_came(self, store: Any) -> None:
        sources = [
            {},
            {"how": "one-click", "secret": "0a1b2c3d", "user_agent": "Mozilla/5.0 " + "\xe9" * 244},
            {"how": "webhook:sendgrid", "address": "2001:db8::1"},
            {"how": "page", "secret": "0a1b2c3d", "user_agent": "\0 '$x", "address": "192.0.2.1"},
        ]
        for number, source in enumerate(sources):
            await store.apply(change(str(number), at=number, source=source, a=bool(number % 2)))
        await store.apply(change("idle", at=9, source={"how": "page"}, a=True))
        names = ("how", "secret", "user_agent", "address")
        expected = [{**dict.fromkeys(names, ""), "how": "api", **source} for source in sources]
        records = await all_pages(store.history, WORKSPACE, user("u"), limit=1)
        assert [{name: getattr(record, name) for name in names} for record in records] == expected

    @on_open
    async def test_the_history_begins_at_a_time(self, store: Any) -> None:
        for number in range(12):
            who = f"u{number % 2}"
            await store.apply(change(str(number), user_id=who, at=number, a=number % 4 < 2))
        for limit in (1, 100):
            for subject in (user("u1"), None):
                whole = await all_pages(store.history, WORKSPACE, subject)
                read = functools.partial(store.history, WORKSPACE, subject, since=TIME + 5)
                found = await all_pages(read, limit=limit)
                assert found == [one for one in whole if one.at >= TIME + 5]
                assert len(found) == (7 if subject is None else 4)

    @on_store
    async def test_one_change_from_concurrent_calls_is_applied_once(self, bench: Bench) -> None:
        stores = [await bench.open()]
        if bench.subject.can("atomic-updates"):
            stores.append(await bench.open())
        calls = [stores[n % len(stores)].apply(change("1", a=True, b=True)) for n in range(20)]
        assert [dict(one) for one in await asyncio.gather(*calls)] == [{"a": True, "b": True}] * 20
        store = stores[0]
        assert len(await all_pages(store.history, None, None)) == 2

    @on_store
    async def test_concurrent_changes_leave_a_consistent_history(self, bench: Bench) -> None:
        stores = [await bench.open()]
        if bench.subject.can("atomic-updates"):
            stores.append(await bench.open())
        calls = [stores[n % len(stores)].apply(change(str(n), a=bool(n % 3))) for n in range(20)]
        await asyncio.gather(*calls)
        store = stores[0]
        # In whatever order they were applied, the history leads step by step to the state.
        records = await all_pages(store.history, WORKSPACE, user("u"))
        value = None
        for record in records:
            assert record.before is value
            assert record.after is not value
            value = record.after
        assert dict(await store.state(WORKSPACE, user("u"))) == {"a": value}
        assert await unproven(store) == []

    @on_open
    async def test_a_change_makes_the_user_exist(self, store: Any) -> None:
        await store.apply(change("1", user_id="fresh", at=5, a=True))
        profile = await store.profile(WORKSPACE, "fresh")
        assert profile is not None
        assert (profile.created_at, profile.updated_at) == (TIME + 5, TIME + 5)

    @on_open
    async def test_a_user_and_a_visitor_with_one_id_are_two(self, store: Any) -> None:
        for number, name in enumerate(AWKWARD):
            as_user = change(f"u{number}", user_id=name, at=1, a=True, b=True)
            as_visitor = change(f"v{number}", anonymous_id=name, at=2, a=False)
            assert dict(await store.apply(as_user)) == {"a": True, "b": True}
            assert dict(await store.apply(as_visitor)) == {"a": False}
            assert dict(await store.state(WORKSPACE, user(name))) == {"a": True, "b": True}
            assert dict(await store.state(WORKSPACE, visitor(name))) == {"a": False}
            (record,) = await all_pages(store.history, WORKSPACE, visitor(name))
            assert (record.subject, record.user_id, record.anonymous_id) == (
                visitor(name),
                None,
                name,
            )
            assert (record.before, record.after) == (None, False)
            own = await all_pages(store.history, WORKSPACE, user(name))
            assert {one.subject for one in own} == {user(name)}
        states = await all_pages(store.scan_subscriptions, WORKSPACE, limit=5)
        assert len(states) == 3 * len(AWKWARD)
        assert {(state.subject, state.group_id, state.subscribed) for state in states} == {
            (subject, group, subscribed)
            for name in AWKWARD
            for subject, group, subscribed in (
                (user(name), "a", True),
                (user(name), "b", True),
                (visitor(name), "a", False),
            )
        }

    @on_open
    async def test_a_choice_of_a_visitor_makes_no_profile(self, store: Any) -> None:
        if Storage not in type(store).__mro__:
            pytest.skip("this storage is not a Storage")
        await store.apply(change("1", anonymous_id="v", a=True))
        assert await store.profile(WORKSPACE, "v") is None
        assert await store.visitor(WORKSPACE, "v") is None
        assert await all_pages(store.scan_users, None) == []
        assert await all_pages(store.scan_visitors, None) == []

    @on_open
    async def test_choices_of_similar_user_ids_are_separate(self, store: Any) -> None:
        for number, name in enumerate(AWKWARD):
            await store.apply(change(name, user_id=name, at=number, a=bool(number % 2)))
        states = await all_pages(store.scan_subscriptions, WORKSPACE, limit=5)
        assert {state.user_id: state.subscribed for state in states} == {
            name: bool(number % 2) for number, name in enumerate(AWKWARD)
        }
        for number, name in enumerate(AWKWARD):
            assert dict(await store.state(WORKSPACE, user(name))) == {"a": bool(number % 2)}

    @on_open
    async def test_scans_of_choices_and_of_their_history_are_complete(self, store: Any) -> None:
        for number in range(40):
            await store.apply(
                change(
                    str(number),
                    user_id=f"u{number % 4}",
                    workspace=(WORKSPACE, "other")[number % 2],
                    at=number,
                    a=number % 8 < 4,
                    b=True,
                )
            )
        for limit in (1, 7, 100):
            everything = await all_pages(store.history, None, None, limit=limit)
            assert [one.at for one in everything] == sorted(one.at for one in everything)
            mine = await all_pages(store.history, WORKSPACE, user("u2"), limit=limit)
            assert [_summary(one) for one in mine] == [
                _summary(one) for one in everything if one.user_id == "u2"
            ]
            states = await all_pages(store.scan_subscriptions, None, limit=limit)
            assert len(states) == len({(s.workspace_id, s.user_id, s.group_id) for s in states})
            assert len(states) == 8
            assert len(await all_pages(store.scan_subscriptions, "other", limit=limit)) == 4
        assert await all_pages(store.history, "other", user("u2")) == []

    @on_store
    async def test_a_change_is_remembered_after_reopening(self, bench: Bench) -> None:
        store = await bench.open()
        await store.apply(change("1", a=True))
        await store.close()
        store = await bench.open()
        assert dict(await store.apply(change("1", a=False))) == {"a": True}
