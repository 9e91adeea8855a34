# SPDX-License-Identifier: Apache-2.0
"""The promises of a :class:`~engage.store.facade.Storage` about links, limits and scans."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engage.api import ProfileLimits, Status
from engage.testing.factories import (
    TIME,
    WORKSPACE,
    all_pages,
    event,
    identify,
    ids,
    profile_of,
    store_all,
)
from engage.testing.storage.harness import Bench, on_open, on_store


class UserTests:
    """Links, limits, ``scan_users``, ``scan_groups``."""

    # ----------------------------------------------------------------------------- links
    @on_open
    async def test_anonymous_ids_are_linked_to_users(self, store: Any) -> None:
        await store_all(
            store,
            # Links do not create a user.
            event("1", user_id="u", anonymous_id="v1"),
            event("2", type="page", user_id="stranger", anonymous_id="v2"),
        )
        assert await all_pages(store.scan_users, None) == []
        await store_all(
            store,
            identify("3", "u", anonymous_id="v3"),
            event("4", type="alias", user_id="u", previousId="v0"),
            event("5", user_id="u", anonymous_id="v1"),
            event("6", user_id="u", anonymous_id="email:a@b.c"),
            event("7", user_id="u", anonymous_id="phone:+1"),
            event("8", user_id="u", anonymous_id="u"),
            event("9", user_id="u", anonymous_id="null"),
        )
        profile = await profile_of(store, "u")
        assert profile.anonymous_ids == ["v0", "v1", "v3"]
        assert await store.profile(WORKSPACE, "stranger") is None

    @on_open
    async def test_users_are_found_by_the_beginning_of_their_ids(self, store: Any) -> None:
        """Of a user without an event that makes it exist, a storage may know the id or not."""
        names = ["Ann", "ann", "anna", "ann\uffff", "ann:1", "an", "a\0", "%", "зака", "\U0001f600"]
        await store_all(
            store,
            *(identify(str(number), name) for number, name in enumerate(names)),
            identify("other", "ann-other", workspace="other"),
            event("group", type="group", user_id="an", groupId="anngroup"),
            event("link", user_id="ann-linked", anonymous_id="visitor"),
        )
        if await store.users_beginning(WORKSPACE, "", limit=1) is None:
            pytest.skip("this storage does not find users by the beginning of an id")
        for text in ("ann", "a", "A", "a\0", "зак", "\U0001f600", "%", "nobody", "", "\ud800"):
            users = await store.users_beginning(WORKSPACE, text, limit=100)
            assert users is not None
            expected = sorted(name for name in names if name.startswith(text))
            assert sorted(name for name in users if name != "ann-linked") == expected
        few = await store.users_beginning(WORKSPACE, "a", limit=2)
        assert few is not None
        assert len(few) == 2

    @on_open
    async def test_users_are_found_by_the_beginning_of_an_identifier(self, store: Any) -> None:
        await store_all(
            store,
            identify("1", "u1", traits={"email": "Ann@Example.com", "phone": "+1 (2) 3"}),
            identify("2", "u2", traits={"email": "anna@example.com", "name": "ann"}),
            identify("3", "ann", traits={"email": "bob@example.com"}),
            identify("4", "moved", traits={"email": "ann@example.com"}),
            identify("5", "removed", traits={"email": "ann@example.com"}),
            identify("6", "away", workspace="other", traits={"email": "ann@example.com"}),
        )
        await store_all(store, identify("7", "moved", traits={"email": "new@example.com"}))
        await store_all(store, identify("8", "removed", traits={"email": None}))
        for trait, text, expected in (
            ("email", "ann", ["u1", "u2"]),
            ("email", "ann@", ["u1"]),
            ("email", "Ann", []),
            ("email", "", ["ann", "moved", "u1", "u2"]),
            ("email", "\ud800", []),
            ("phone", "+12", ["u1"]),
        ):
            users = await store.users_beginning(WORKSPACE, text, trait=trait, limit=100)
            if users is None:
                pytest.skip("this storage does not find users by a beginning")
            assert sorted(users) == expected, (trait, text)
        few = await store.users_beginning(WORKSPACE, "a", trait="email", limit=1)
        assert len(few) == 1

    @on_open
    async def test_an_anonymous_id_may_have_the_text_of_a_user_id(self, store: Any) -> None:
        """Except that of the user to which it would be linked: some clients send it as both."""
        await store_all(store, identify("1", "known"), identify("0", "u", workspace="other"))
        await store_all(
            store,
            event("2", type="alias", user_id="u", previousId="known"),
            event("3", user_id="u", anonymous_id="known"),
            event("4", type="alias", user_id="u", previousId="unknown"),
            event("5", user_id="u", anonymous_id="u"),
            event("6", type="alias", user_id="v", previousId="known", workspace="other"),
        )
        profile = await profile_of(store, "u")
        assert profile.anonymous_ids == ["known", "unknown"]
        profile = await profile_of(store, "v", "other")
        assert profile.anonymous_ids == ["known"]

    @on_open
    async def test_one_anonymous_id_can_be_linked_to_several_users(self, store: Any) -> None:
        for number in range(3):
            await store_all(store, identify(str(number), f"u{number}", anonymous_id="shared"))
        for user in await all_pages(store.scan_users, WORKSPACE):
            assert user.anonymous_ids == ["shared"]

    # ---------------------------------------------------------------------------- limits
    @on_store
    async def test_limits_drop_changes(self, bench: Bench) -> None:
        limits = ProfileLimits(traits=3, trait_bytes=200, links=2, memberships=2)
        store = await bench.open(profile_limits=limits)
        # One write each, so that it is certain which of them exceed the limits.
        for number in range(5):
            await store_all(store, identify(f"t{number}", "u", number, traits={f"t{number}": 1}))
            await store_all(store, identify(f"l{number}", "u", anonymous_id=f"v{number}"))
            group = event(f"g{number}", type="group", user_id="u", groupId=f"g{number}")
            await store_all(store, group)
        profile = await profile_of(store, "u")
        assert profile.traits == {"t0": 1, "t1": 1, "t2": 1}
        assert profile.anonymous_ids == ["v0", "v1"]
        assert profile.groups == ["g0", "g1"]
        assert store.dropped_changes == 2 + 3 + 3
        assert len(await ids(store)) == 15
        # What is stored can still change, and sending a dropped change again does not store it.
        await store_all(store, identify("t", "u", 9, traits={"t0": 2}))
        ended = event("g", type="group", user_id="u", groupId="g1", at=9, assigned=False)
        await store_all(store, ended)
        (outcome,) = await store.write([identify("t4", "u", 9, traits={"t4": 1})])
        assert outcome.status is Status.DUPLICATE
        profile = await profile_of(store, "u")
        assert profile.traits == {"t0": 2, "t1": 1, "t2": 1}
        assert profile.groups == ["g0"]
        assert store.dropped_changes == 8

    @on_store
    async def test_the_limit_of_bytes_drops_traits(self, bench: Bench) -> None:
        limits = ProfileLimits(trait_bytes=1000)
        store = await bench.open(profile_limits=limits)
        await store_all(store, identify("1", "u", 1, traits={"a": "x" * 600}))
        await store_all(store, identify("2", "u", 2, traits={"b": "x" * 391}))
        await store_all(store, identify("3", "u", 3, traits={"c": "x" * 390}))
        group = event("4", type="group", groupId="g", traits={"a": "x" * 2000, "b": 1})
        await store_all(store, group)
        profile = await profile_of(store, "u")
        assert sorted(profile.traits) == ["a", "c"]
        (found,) = await all_pages(store.scan_groups, WORKSPACE)
        assert found.traits == {"b": 1}
        assert store.dropped_changes == 2

    @on_store
    async def test_identifiers_always_have_room(self, bench: Bench) -> None:
        """Anyone with a write key can set all the traits that a user has room for. The address by
        which the user is found is set nevertheless."""
        limits = ProfileLimits(traits=2, trait_bytes=300, identifier_bytes=100)
        store = await bench.open(profile_limits=limits)
        await store_all(store, identify("1", "u", 1, traits={"a": "x" * 100, "b": "x" * 100}))
        assert store.dropped_changes == 0
        await store_all(store, identify("2", "u", 2, traits={"email": "a@b.c", "phone": "+1"}))
        # Up to the limit of bytes, and one more.
        await store_all(store, identify("3", "u", 3, traits={"email": "x" * 91}))
        assert store.dropped_changes == 0
        await store_all(store, identify("4", "u", 4, traits={"email": "y" * 92, "c": 1}))
        assert store.dropped_changes == 2
        # A trait of another name does not get the room, nor does one of another workspace's users.
        await store_all(store, identify("5", "u", 5, traits={"code": "1"}))
        assert store.dropped_changes == 3
        profile = await profile_of(store, "u")
        assert profile.traits == {
            "a": "x" * 100,
            "b": "x" * 100,
            "email": "x" * 91,
            "phone": "+1",
        }
        # A value that is too large counts, and makes room again when it is replaced.
        await store_all(store, identify("6", "v", 6, traits={"email": "y" * 92, "a": 1}))
        await store_all(store, identify("7", "v", 7, traits={"b": 1}))
        assert store.dropped_changes == 4
        await store_all(store, identify("8", "v", 8, traits={"email": "y"}))
        await store_all(store, identify("9", "v", 9, traits={"b": 1}))
        assert store.dropped_changes == 4
        group = event("g", type="group", groupId="g", traits={"a": 1, "b": 2, "email": "a@b.c"})
        await store_all(store, group)
        assert store.dropped_changes == 5

    # ----------------------------------------------------------------------------- scans
    @on_open
    async def test_scans_of_users_and_groups_are_complete(self, store: Any) -> None:
        names = [f"u{number * 31 % 100}" for number in range(100)]
        for start in range(0, 100, 20):
            batch = []
            for number, name in enumerate(names[start : start + 20], start):
                workspace = (WORKSPACE, "other")[number % 2]
                batch.append(identify(f"i{name}", name, number, workspace=workspace))
                batch.append(
                    event(f"g{name}", type="group", groupId=f"g{name}", workspace=workspace)
                )
            await store_all(store, *batch)
        for limit in (1, 9, 1000):
            for which in (None, WORKSPACE, "other"):
                wanted = sorted(
                    name
                    for number, name in enumerate(names)
                    if which in (None, (WORKSPACE, "other")[number % 2])
                )
                users = await all_pages(store.scan_users, which, limit=limit)
                assert sorted(user.user_id for user in users) == wanted
                groups = await all_pages(store.scan_groups, which, limit=limit)
                assert sorted(group.group_id for group in groups) == [f"g{name}" for name in wanted]
        assert await all_pages(store.scan_users, "nobody") == []

    @on_store
    async def test_profiles_are_the_same_after_reopening(self, bench: Bench) -> None:
        store = await bench.open()
        await store_all(store, identify("1", "u", 4, traits={"email": "a@b.c"}, anonymous_id="v"))
        before = await store.profile(WORKSPACE, "u")
        await store.close()
        again = await bench.open()
        assert await again.profile(WORKSPACE, "u") == before
        users = await again.find_users(WORKSPACE, "email", ["a@b.c"])
        assert dict(users) == {"a@b.c": ["u"]}
        await store_all(again, identify("2", "u", 3, anonymous_id="v"))
        profile = await profile_of(again, "u")
        assert (profile.created_at, profile.updated_at) == (TIME + 3, TIME + 4)

    @on_store
    async def test_concurrent_writes_change_one_user(self, bench: Bench) -> None:
        bench.require("atomic-updates")
        store, second = await bench.open(), await bench.open()
        await asyncio.gather(
            *(
                (store, second)[number % 2].write(
                    [identify(str(number), "u", number, traits={"n": number, f"t{number}": 1})]
                )
                for number in range(60)
            )
        )
        profile = await profile_of(store, "u")
        assert profile.traits == {"n": 59, **{f"t{number}": 1 for number in range(60)}}
