# SPDX-License-Identifier: Apache-2.0
"""The promises of a storage about merging: profiles are the merge of the stored events, in
whatever order these arrive.
"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engage.api import (
    API_ORIGIN,
    OPERATOR_ORIGIN,
    Event,
    Kind,
    Link,
    Membership,
    ProfileLimits,
    RemovedTraits,
    Seen,
    Status,
    Traits,
    UserProfile,
    changes_of,
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
    store_all,
)
from engage.testing.storage.harness import Bench, on_open, on_store


def removal(message_id: str, user_id: str, at: int, *traits: str) -> Event:
    """Return the event by which an operator removes traits."""
    return identify(message_id, user_id, at, origin=OPERATOR_ORIGIN, removedTraits=list(traits))


def _named_so(name: str, user_id: str, **fields: Any) -> Event:
    return identify(f"i-{user_id}", user_id, traits={"a": name}, **fields)


def _member_if_greater(name: str, user_id: str, **fields: Any) -> Event:
    group: Any = {"type": "group", "groupId": "g", "assigned": name == "twilio"}
    return event(f"g-{user_id}", user_id=user_id, **group, **fields)


class ProfileTests:
    """The last write wins, for each trait and each membership."""

    @on_open
    async def test_only_identifying_events_create_users(self, store: Any) -> None:
        await store_all(
            store,
            event("1", user_id="tracked"),
            event("2", type="page", user_id="viewed", anonymous_id="v"),
            identify("3", "identified", 5),
            event("4", type="group", user_id="grouped", groupId="g"),
            event("5", type="alias", user_id="aliased", previousId="before"),
            event("6", type="identify", anonymous_id="nobody", traits={"x": 1}),
            event("7", type="group", anonymous_id="nobody", groupId="h", traits={"x": 1}),
            identify("8", "undefined", traits={"x": 1}),
            identify("9", "[object Object]"),
            event("10", type="group", user_id="grouped", groupId="undefined", traits={"x": 1}),
            event("11", type="group", user_id="grouped", groupId=" NULL "),
        )
        users = await all_pages(store.scan_users, None)
        assert sorted(user.user_id for user in users) == ["aliased", "grouped", "identified"]
        assert await store.profile(WORKSPACE, "tracked") is None
        assert await store.profile(WORKSPACE, "viewed") is None
        assert await store.profile("other", "identified") is None
        assert await store.profile(WORKSPACE, "identified") == UserProfile(
            workspace_id=WORKSPACE,
            user_id="identified",
            traits={},
            created_at=TIME + 5,
            updated_at=TIME + 5,
            anonymous_ids=[],
            groups=[],
        )
        groups = await all_pages(store.scan_groups, None)
        assert {group.group_id: group.traits for group in groups} == {"g": {}, "h": {"x": 1}}
        grouped = await profile_of(store, "grouped")
        assert grouped.groups == ["g"]

    @on_open
    async def test_writes_at_the_same_time_change_one_user(self, store: Any) -> None:
        """As many writes as the storage declares; see ``Storage.concurrent_writes``."""
        calls = store.concurrent_writes
        assert calls >= 1
        expected: dict[str, object] = {}
        for turn in range(10):
            writes = []
            for call in range(calls):
                name = f"{turn}-{call}"
                expected |= {name: call, "last": name}
                writes.append(
                    [
                        # All writes of a turn have the first event; the others differ.
                        identify(f"{turn}", "u", turn, traits={"turn": turn}),
                        identify(name, "u", len(expected), traits={name: call, "last": name}),
                        event(f"seen-{name}", user_id="u", anonymous_id=name),
                    ]
                )
            outcomes = await asyncio.gather(*map(store.write, writes))
            first = [outcome[0].status for outcome in outcomes]
            assert sorted(first) == sorted([Status.STORED] + [Status.DUPLICATE] * (calls - 1))
            expected["turn"] = turn
        profile = await profile_of(store, "u")
        assert profile.traits == expected
        assert len(profile.anonymous_ids) == 10 * calls

    @on_open
    async def test_the_latest_value_of_each_trait_wins(self, store: Any) -> None:
        await store_all(store, identify("1", "u", 10, traits={"a": 1, "b": 1, "c": 1}))
        await store_all(store, identify("2", "u", 20, traits={"b": 2, "c": None}))
        await store_all(store, identify("3", "u", 5, traits={"a": 3, "c": 3, "d": {"x": [1, {}]}}))
        profile = await profile_of(store, "u")
        assert profile.traits == {"a": 1, "b": 2, "c": None, "d": {"x": [1, {}]}}
        # A storage may leave the times out.
        times = {"a": TIME + 10, "b": TIME + 20, "c": TIME + 20, "d": TIME + 5}
        assert profile.trait_times in ({}, times)
        assert (profile.created_at, profile.updated_at) == (TIME + 5, TIME + 20)

    @on_open
    async def test_of_equal_times_and_message_ids_the_greater_origin_wins(self, store: Any) -> None:
        """In one write and in several, in both orders."""
        for workspace, names in ("acme", ("api", "twilio")), ("other", ("twilio", "api")):
            together, apart = (
                [
                    made(name, user, workspace=workspace, origin=name)
                    for name in names
                    for made in (_named_so, _member_if_greater)
                ]
                for user in ("together", "apart")
            )
            await store.write(together)
            for one in apart:
                await store.write([one])
            for user in ("together", "apart"):
                profile = await store.profile(workspace, user)
                assert (profile.traits, profile.groups) == ({"a": "twilio"}, ["g"])

    @on_open
    async def test_a_retry_changes_nothing(self, store: Any) -> None:
        """The client sends an event again: the server receives it later, and corrects the time."""
        first = identify("m", "u", 10, traits={"a": "first"})
        await store_all(store, first, identify("n", "u", 20, traits={"a": "second"}))
        before = await store.profile(WORKSPACE, "u")
        for again in (
            identify("m", "u", 30, received=1000, traits={"a": "first"}),
            identify("m", "u", 30, received=2000, traits={"a": "changed", "b": 1}),
            event("m", type="group", user_id="u", groupId="g", anonymous_id="v", at=40),
        ):
            (outcome,) = await store.write([again])
            assert outcome.status is Status.DUPLICATE
        assert await store.profile(WORKSPACE, "u") == before
        assert await all_pages(store.scan_groups, None) == []

    @on_open
    async def test_similar_names_are_different(self, store: Any) -> None:
        traits = {name: number for number, name in enumerate([*AWKWARD, ""])}
        batch: list[Event] = []
        names = sorted(set(AWKWARD) - {"null"})
        for name in names:
            batch += [
                identify(f"i:{name}", name, 1, traits=traits),
                event(f"g:{name}", type="group", user_id="u", groupId=name, traits=traits),
                identify(f"l:{name}", "u", anonymous_id=f"v{name}"),
            ]
        await store_all(store, *batch)
        users = await all_pages(store.scan_users, WORKSPACE, limit=7)
        assert sorted(one.user_id for one in users) == sorted([*names, "u"])
        for user in users:
            assert user.user_id == "u" or user.traits == traits
        groups = await all_pages(store.scan_groups, WORKSPACE, limit=7)
        assert sorted(group.group_id for group in groups) == names
        assert all(group.traits == traits for group in groups)
        profile = await profile_of(store, "u")
        assert profile.groups == names
        assert profile.anonymous_ids == sorted(f"v{name}" for name in names)

    @on_open
    async def test_the_latest_membership_of_each_group_wins(self, store: Any) -> None:

        def group(name: str, at: int, assigned: bool | None = None) -> Event:
            return event(
                f"{name}{at}", type="group", user_id="u", groupId=name, at=at, assigned=assigned
            )

        await store_all(store, group("b", 5), group("a", 3), group("c", 9, False), group("d", 1))
        await store_all(store, group("a", 4, False), group("b", 4, False), group("c", 8, True))
        await store_all(store, group("d", 2, False))
        await store_all(store, group("d", 3))
        profile = await profile_of(store, "u")
        assert profile.groups == ["b", "d"]

    @on_open
    async def test_an_operator_removes_traits(self, store: Any) -> None:
        """A removal is a value of the register: the user does not have the trait, until a later
        event sets it again."""
        traits = {"email": "a@b.c", "plan": "pro", "n": None, "": 1}
        await store_all(store, identify("1", "u", 10, traits=traits))
        await store_all(store, removal("2", "u", 20, "email", "n", "", "unknown"))
        # Traits of an earlier event that arrives only now are also removed.
        await store_all(store, identify("3", "u", 15, traits={"email": "late@b.c", "unknown": 1}))

        async def traits_of(user: str) -> Any:
            profile = await profile_of(store, user)
            [scanned] = [
                one for one in await all_pages(store.scan_users, WORKSPACE) if one.user_id == user
            ]
            assert scanned == profile
            return profile.traits

        assert await traits_of("u") == {"plan": "pro"}
        wanted = ["a@b.c", "late@b.c", "new@b.c"]
        assert dict(await store.find_users(WORKSPACE, "email", wanted)) == {}
        assert await all_pages(store.holders, WORKSPACE, "email", "a@b.c") == []
        await store_all(store, identify("4", "u", 30, traits={"email": "new@b.c", "n": None}))
        assert await traits_of("u") == {"plan": "pro", "email": "new@b.c", "n": None}
        assert dict(await store.find_users(WORKSPACE, "email", wanted)) == {"new@b.c": ["u"]}
        await store_all(store, removal("5", "v", 30, "email"))
        assert await traits_of("v") == {}

    @on_open
    async def test_only_an_operator_removes_traits(self, store: Any) -> None:
        await store_all(store, identify("1", "u", 10, traits={"a": 1}))
        for origin in (API_ORIGIN, "sendgrid"):
            attempt = identify("2", "u", 20, origin=origin, removedTraits=["a"])
            await store_all(store, attempt)
        profile = await profile_of(store, "u")
        assert profile.traits == {"a": 1}

    @on_store
    async def test_a_removed_trait_makes_room(self, bench: Bench) -> None:
        limits = ProfileLimits(traits=2, trait_bytes=100)
        store = await bench.open(profile_limits=limits)
        await store_all(store, identify("1", "u", 1, traits={"a": "x" * 40, "b": "x" * 40}))
        await store_all(store, identify("2", "u", 2, traits={"c": 1}))
        assert store.dropped_changes == 1
        await store_all(store, removal("3", "u", 3, "a", "d", "e", "f"))
        await store_all(store, identify("4", "u", 4, traits={"c": "x" * 40}))
        assert store.dropped_changes == 1
        # Setting the removed trait again needs room again.
        await store_all(store, identify("5", "u", 5, traits={"a": 1}))
        assert store.dropped_changes == 2
        await store_all(store, removal("6", "u", 6, "b"))
        await store_all(store, identify("7", "u", 7, traits={"a": 1}))
        profile = await profile_of(store, "u")
        assert profile.traits == {"a": 1, "c": "x" * 40}

    def test_last_write_wins_in_every_order(self: Any, tmp_path: Path) -> None:
        """Any events, in any order and any writes, some of them twice, make the same profiles."""
        numbers = itertools.count()
        with Bench(self, tmp_path) as bench:
            store = bench.run(bench.open())

            @settings(
                max_examples=self.examples,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(st.data())
            def check(data: st.DataObject) -> None:
                # A workspace for each example, so that they can share the store.
                workspace = f"w{next(numbers)}"
                events = data.draw(_events(workspace))
                arrivals = data.draw(st.permutations(events))
                repeats = data.draw(st.lists(st.sampled_from(events), max_size=5))
                sizes = data.draw(st.lists(st.integers(1, 6), max_size=8))
                bench.run(_arrive(store, [*arrivals, *repeats], sizes))
                assert bench.run(_profiles(store, workspace)) == _merged(events)

            check()


#: Few values, some of them often, so that different events set the same trait of the same user at
#: the same millisecond.
_NAMES = st.sampled_from(["a", "a", "b", "a\x00", "A"])
_TIMES = st.sampled_from([0, 0, 0, 1, 2])


@st.composite
def _events(draw: st.DrawFn, workspace: str) -> list[Event]:
    identities = draw(
        st.lists(
            st.tuples(
                st.sampled_from("abcdeABC:1"), st.sampled_from(["api", "sendgrid", OPERATOR_ORIGIN])
            ),
            min_size=3,
            max_size=9,
            unique=True,
        )
    )
    found = []
    for message_id, origin in identities:
        fields: dict[str, Any] = {
            "traits": draw(st.dictionaries(_NAMES, st.integers(0, 9), min_size=1, max_size=3))
        }
        kind = draw(st.sampled_from(["identify", "identify", "group", "track"]))
        if origin == OPERATOR_ORIGIN:
            fields = {"removedTraits": draw(st.lists(_NAMES, min_size=1, max_size=2))}
            kind = "identify"
        if kind == "group":
            fields["groupId"] = draw(_NAMES)
            if draw(st.booleans()):
                fields["assigned"] = draw(st.booleans())
        found.append(
            event(
                message_id,
                type=kind,
                user_id=draw(st.sampled_from(["u", "u", "v"])),
                # Never the id of a user: whether such an id is linked depends on the order.
                anonymous_id=draw(st.sampled_from([None, "x", "y\x00", "y"])),
                at=draw(_TIMES),
                workspace=workspace,
                origin=origin,
                **fields,
            )
        )
    return found


async def _arrive(store: Storage, events: list[Event], sizes: list[int]) -> None:
    start = 0
    for size in [*sizes, len(events)]:
        if events[start : start + size]:
            await store.write(events[start : start + size])
        start += size


async def _profiles(store: Storage, workspace: str) -> Any:
    users = {
        one.user_id: (
            dict(one.traits),
            one.created_at,
            one.updated_at,
            list(one.anonymous_ids),
            list(one.groups),
        )
        for one in await all_pages(store.scan_users, workspace)
    }
    for name, user in users.items():
        one = await profile_of(store, name, workspace)
        assert dict(one.traits) == user[0]
    groups = {
        one.group_id: dict(one.traits) for one in await all_pages(store.scan_groups, workspace)
    }
    return users, groups


def _merged(events: list[Event]) -> Any:
    """Return the same profiles, computed in a simple way: in the order of the versions, later
    changes over earlier ones."""
    times: dict[str, list[int]] = {}
    traits: dict[str, dict[str, Any]] = {}
    links: dict[str, set[str]] = {}
    members: dict[str, dict[str, bool]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for one in sorted(events, key=lambda one: (one.timestamp, one.message_id, one.origin)):
        for change in changes_of(one):
            match change:
                case Seen(Kind.USER, user):
                    times.setdefault(user, []).append(one.timestamp)
                case Seen(Kind.GROUP, group):
                    groups.setdefault(group, {})
                case Traits(Kind.USER, user, values):
                    traits.setdefault(user, {}).update(values)
                case RemovedTraits(Kind.USER, user, names):
                    for name in names:
                        traits.setdefault(user, {}).pop(name, None)
                case Traits(Kind.GROUP, group, values):
                    groups.setdefault(group, {}).update(values)
                case Membership(Kind.USER, user, group, assigned):
                    members.setdefault(user, {})[group] = assigned
                case Link(user, anonymous):
                    links.setdefault(user, set()).add(anonymous)
    users = {
        user: (
            traits.get(user, {}),
            min(at),
            max(at),
            sorted(links.get(user, ())),
            sorted(group for group, assigned in members.get(user, {}).items() if assigned),
        )
        for user, at in times.items()
    }
    return users, groups
