# SPDX-License-Identifier: Apache-2.0
"""The promises of a :class:`~engage.api.ProfileStore` about links, look-ups, limits and scans."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from engage.api import Event, ProfileLimits, ProfileStore, Status

from .factories import TIME, WORKSPACE, all_pages, event, identify, ids, store_all
from .harness import Bench, on_store


class UserTests:
    """Links, ``find_users``, limits, ``scan_users``, ``scan_groups``."""

    # ----------------------------------------------------------------------------- links
    @on_store
    async def test_anonymous_ids_are_linked_to_users(self, bench: Bench) -> None:
        store = await bench.open_as(ProfileStore)
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
        profile = await store.profile(WORKSPACE, "u")
        assert profile is not None
        assert profile.anonymous_ids == ["v0", "v1", "v3"]
        assert await store.profile(WORKSPACE, "stranger") is None

    @on_store
    async def test_the_id_of_a_user_is_not_linked_as_an_anonymous_id(self, bench: Bench) -> None:
        store = await bench.open_as(ProfileStore)
        await store_all(store, identify("1", "known"), identify("0", "u", workspace="other"))
        await store_all(
            store,
            event("2", type="alias", user_id="u", previousId="known"),
            event("3", user_id="u", anonymous_id="known"),
            event("4", type="alias", user_id="u", previousId="unknown"),
            # The id of a user of another workspace can be linked.
            event("5", type="alias", user_id="v", previousId="u", workspace="other"),
            event("6", type="alias", user_id="v", previousId="known", workspace="other"),
        )
        profile = await store.profile(WORKSPACE, "u")
        assert profile is not None
        assert profile.anonymous_ids == ["unknown"]
        profile = await store.profile("other", "v")
        assert profile is not None
        assert profile.anonymous_ids == ["known"]

    @on_store
    async def test_one_anonymous_id_can_be_linked_to_several_users(self, bench: Bench) -> None:
        store = await bench.open_as(ProfileStore)
        for number in range(3):
            await store_all(store, identify(str(number), f"u{number}", anonymous_id="shared"))
        for one in await all_pages(store.scan_users, WORKSPACE):
            assert one.anonymous_ids == ["shared"]

    # -------------------------------------------------------------------------- look-ups
    @on_store
    async def test_users_are_found_by_an_identifier(self, bench: Bench) -> None:
        store = await bench.open_as(ProfileStore)
        await store_all(
            store,
            identify("1", "young", 9, traits={"email": " Ann@Example.COM", "phone": "+1 (2) 3"}),
            identify("2", "old", 1, traits={"email": "ann@example.com"}),
            identify("3", "middle-b", 6, traits={"email": "ANN@example.com"}),
            identify("4", "middle-a", 5, traits={"email": "ann@example.com\t"}),
            identify("5", "moved", 2, traits={"email": "ann@example.com"}),
            identify("6", "nul", 2, traits={"email": "ann@example.com\x00"}),
            identify("7", "number", 2, traits={"phone": 123, "email": ["ann@example.com"]}),
            identify("8", "else", 2, traits={"name": "ann@example.com"}),
            identify("9", "away", 2, workspace="other", traits={"email": "ann@example.com"}),
            identify("a", "coded", 2, workspace="other", traits={"code": " Ann\x00b "}),
        )
        await store_all(store, identify("b", "moved", 3, traits={"email": "new@example.com"}))
        await store_all(store, identify("c", "new", 3, traits={"email": "x@example.com"}))
        await store_all(store, identify("d", "new", 4, traits={"email": None}))
        wanted = ["ann@example.com", "new@example.com", "x@example.com", "nobody@example.com"]
        assert dict(await store.find_users(WORKSPACE, "email", wanted)) == {
            "ann@example.com": ["old", "middle-a", "middle-b", "young"],
            "new@example.com": ["moved"],
        }
        found = await store.find_users(WORKSPACE, "email", ["ann@example.com\x00"])
        assert dict(found) == {"ann@example.com\x00": ["nul"]}
        assert dict(await store.find_users(WORKSPACE, "phone", ["+123"])) == {"+123": ["young"]}
        assert dict(await store.find_users("other", "email", wanted)) == {
            "ann@example.com": ["away"]
        }
        assert dict(await store.find_users("other", "code", [" Ann\x00b ", " Ann"])) == {
            " Ann\x00b ": ["coded"]
        }
        assert dict(await store.find_users(WORKSPACE, "email", [])) == {}

    @on_store
    async def test_users_are_not_found_by_an_earlier_value_that_arrives_late(
        self, bench: Bench
    ) -> None:
        store = await bench.open_as(ProfileStore)
        await store_all(store, identify("2", "u", 20, traits={"email": "new@example.com"}))
        await store_all(store, identify("1", "u", 10, traits={"email": "old@example.com"}))
        found = await store.find_users(WORKSPACE, "email", ["old@example.com", "new@example.com"])
        assert dict(found) == {"new@example.com": ["u"]}

    @on_store
    async def test_at_most_a_hundred_users_are_found(self, bench: Bench) -> None:
        store = await bench.open_as(ProfileStore)
        await store_all(
            store,
            *(
                identify(str(number), f"u{number:03}", 200 - number, traits={"email": "a@b.c"})
                for number in range(150)
            ),
        )
        found = await store.find_users(WORKSPACE, "email", ["a@b.c"])
        assert list(found["a@b.c"]) == [f"u{number:03}" for number in range(149, 49, -1)]

    @on_store
    async def test_the_user_with_the_oldest_claim_is_found_first(self, bench: Bench) -> None:
        """A claim is when the server received the value, whatever the timestamps are."""
        store = await bench.open_as(ProfileStore)
        email = {"email": "ann@example.com"}
        await store_all(store, identify("1", "ann", 100, received=100, traits=email))
        for number in range(120):
            forged = identify(f"f{number}", f"f{number}", number, received=200, traits=email)
            await store_all(store, forged)
        found = await store.find_users(WORKSPACE, "email", ["ann@example.com"])
        assert found["ann@example.com"][0] == "ann"
        # A later event with the same value, and one that was received earlier but arrives now.
        await store_all(store, identify("2", "ann", 300, received=300, traits=email))
        await store_all(store, identify("3", "earlier", 400, received=50, traits=email))
        found = await store.find_users(WORKSPACE, "email", ["ann@example.com"])
        assert list(found["ann@example.com"][:2]) == ["earlier", "ann"]

    @on_store
    async def test_a_claim_is_kept_while_the_user_has_another_value(self, bench: Bench) -> None:
        """Otherwise anyone could change a person's address, claim it, and keep it."""
        store = await bench.open_as(ProfileStore)

        def address(name: str, user: str, at: int, email: str) -> Event:
            return identify(name, user, at, traits={"email": email})

        await store_all(store, address("1", "ann", 1, "ann@example.com"))
        await store_all(store, address("2", "ann", 2, "other@example.com"))
        await store_all(store, address("3", "forged", 3, "Ann@example.com"))
        wanted = ["ann@example.com", "other@example.com"]
        found = await store.find_users(WORKSPACE, "email", wanted)
        assert dict(found) == {"ann@example.com": ["forged"], "other@example.com": ["ann"]}
        await store_all(store, address("4", "ann", 4, "ann@example.com "))
        found = await store.find_users(WORKSPACE, "email", wanted)
        assert dict(found) == {"ann@example.com": ["ann", "forged"]}
        # Also an event that does not become the current value is a claim: it arrives late.
        await store_all(store, address("6", "late", 9, "late@example.com"))
        await store_all(store, address("5", "late", 0, "ann@example.com"))
        await store_all(store, address("7", "late", 10, "ann@example.com"))
        found = await store.find_users(WORKSPACE, "email", wanted)
        assert dict(found) == {"ann@example.com": ["late", "ann", "forged"]}

    @on_store
    async def test_claims_are_the_same_in_every_order(self, bench: Bench) -> None:
        store = await bench.open_as(ProfileStore)
        events = [
            identify("a1", "a", 9, received=10, traits={"email": "x@y.z"}),
            identify("b1", "b", 8, received=11, traits={"email": "x@y.z"}),
            identify("a2", "a", 12, received=12, traits={"email": "other@y.z"}),
            identify("a3", "a", 13, received=13, traits={"email": "x@y.z"}),
            identify("c1", "c", 1, received=9, traits={"email": "x@y.z"}),
        ]
        for start in (0, 2, 4):
            workspace = ("acme", "other", "third")[start // 2]
            turned = [*events[start:], *events[:start]]
            part = [replace(one, workspace_id=workspace) for one in turned]
            await store_all(store, *part[:2])
            await store_all(store, *part[2:])
        for workspace in ("acme", "other"):
            found = await store.find_users(workspace, "email", ["x@y.z"])
            assert dict(found) == {"x@y.z": ["c", "a", "b"]}

    @on_store
    async def test_claims_are_kept_after_reopening(self, bench: Bench) -> None:
        store = await bench.open_as(ProfileStore)
        email = {"email": "a@b.c"}
        await store_all(store, identify("1", "first", 9, traits=email))
        await store_all(store, identify("2", "second", 0, received=10, traits=email))
        await store.close()
        again = await bench.open_as(ProfileStore)
        await store_all(again, identify("3", "first", 20, traits=email))
        found = await again.find_users(WORKSPACE, "email", ["a@b.c"])
        assert dict(found) == {"a@b.c": ["first", "second"]}

    @on_store
    async def test_all_holders_of_a_value_are_read(self, bench: Bench) -> None:
        """A signed link must work however many users have the recipient's address. A storage that
        inherits the default of ``holders`` returns at least those that ``find_users`` finds."""
        store = await bench.open_as(ProfileStore)
        default = type(store).holders is ProfileStore.holders
        count = 90 if default else 250
        email = {"email": "a@b.c"}
        users = [f"u{number % 7}{number}" for number in range(count)]
        await store_all(
            store, *(identify(name, name, n // 3, traits=email) for n, name in enumerate(users))
        )
        await store_all(store, identify("x", "moved", 1, traits=email))
        await store_all(store, identify("y", "moved", 2, traits={"email": "b@b.c"}))
        await store_all(store, identify("z", "away", 2, workspace="other", traits=email))
        for limit in (1000, 100) if default else (1000, 250, 100, 7):
            found = await all_pages(store.holders, WORKSPACE, "email", "a@b.c", limit=limit)
            assert sorted(found) == sorted(users)
        for value in ("nobody@b.c", "a@b.c\x00", "\ud800"):
            assert await all_pages(store.holders, WORKSPACE, "email", value) == []

    # ---------------------------------------------------------------------------- limits
    @on_store
    async def test_limits_drop_changes(self, bench: Bench) -> None:
        limits = ProfileLimits(traits=3, trait_bytes=200, links=2, memberships=2)
        store = await bench.open_as(ProfileStore, profile_limits=limits)
        # One write each, so that it is certain which of them exceed the limits.
        for number in range(5):
            await store_all(store, identify(f"t{number}", "u", number, traits={f"t{number}": 1}))
            await store_all(store, identify(f"l{number}", "u", anonymous_id=f"v{number}"))
            group = event(f"g{number}", type="group", user_id="u", groupId=f"g{number}")
            await store_all(store, group)
        profile = await store.profile(WORKSPACE, "u")
        assert profile is not None
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
        profile = await store.profile(WORKSPACE, "u")
        assert profile is not None
        assert profile.traits == {"t0": 2, "t1": 1, "t2": 1}
        assert profile.groups == ["g0"]
        assert store.dropped_changes == 8

    @on_store
    async def test_the_limit_of_bytes_drops_traits(self, bench: Bench) -> None:
        limits = ProfileLimits(trait_bytes=1000)
        store = await bench.open_as(ProfileStore, profile_limits=limits)
        await store_all(store, identify("1", "u", 1, traits={"a": "x" * 600}))
        await store_all(store, identify("2", "u", 2, traits={"b": "x" * 600}))
        await store_all(store, identify("3", "u", 3, traits={"c": "x" * 300}))
        group = event("4", type="group", groupId="g", traits={"a": "x" * 2000, "b": 1})
        await store_all(store, group)
        profile = await store.profile(WORKSPACE, "u")
        assert profile is not None
        assert sorted(profile.traits) == ["a", "c"]
        (found,) = await all_pages(store.scan_groups, WORKSPACE)
        assert found.traits == {"b": 1}
        assert store.dropped_changes == 2

    @on_store
    async def test_identifiers_always_have_room(self, bench: Bench) -> None:
        """Anyone with a write key can set so many traits of a user that no more have room. The
        address by which the user is found is set all the same."""
        limits = ProfileLimits(traits=2, trait_bytes=300, identifier_bytes=100)
        store = await bench.open_as(ProfileStore, profile_limits=limits)
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
        profile = await store.profile(WORKSPACE, "u")
        assert profile is not None
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
    @on_store
    async def test_scans_of_users_and_groups_are_complete(self, bench: Bench) -> None:
        store = await bench.open_as(ProfileStore)
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
                assert sorted(one.user_id for one in users) == wanted
                groups = await all_pages(store.scan_groups, which, limit=limit)
                assert sorted(one.group_id for one in groups) == [f"g{name}" for name in wanted]
        assert await all_pages(store.scan_users, "nobody") == []

    @on_store
    async def test_profiles_are_the_same_after_reopening(self, bench: Bench) -> None:
        store = await bench.open_as(ProfileStore)
        await store_all(store, identify("1", "u", 4, traits={"email": "a@b.c"}, anonymous_id="v"))
        before = await store.profile(WORKSPACE, "u")
        await store.close()
        again = await bench.open_as(ProfileStore)
        assert await again.profile(WORKSPACE, "u") == before
        found = await again.find_users(WORKSPACE, "email", ["a@b.c"])
        assert dict(found) == {"a@b.c": ["u"]}
        await store_all(again, identify("2", "u", 3, anonymous_id="v"))
        profile = await again.profile(WORKSPACE, "u")
        assert profile is not None
        assert (profile.created_at, profile.updated_at) == (TIME + 3, TIME + 4)

    @on_store
    async def test_concurrent_writes_change_one_user(self, bench: Bench) -> None:
        bench.require("atomic-updates")
        store, second = await bench.open_as(ProfileStore), await bench.open()
        await asyncio.gather(
            *(
                (store, second)[number % 2].write(
                    [identify(str(number), "u", number, traits={"n": number, f"t{number}": 1})]
                )
                for number in range(60)
            )
        )
        profile = await store.profile(WORKSPACE, "u")
        assert profile is not None
        assert profile.traits == {"n": 59, **{f"t{number}": 1 for number in range(60)}}
