# SPDX-License-Identifier: Apache-2.0
"""The promises of a :class:`~engage.store.facade.Storage` about users with the same identifier."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engage.api import OPERATOR_ORIGIN, Event, ProfileLimits
from engage.store.facade import Storage
from engage.testing.factories import WORKSPACE, all_pages, event, identify, store_all, user
from engage.testing.storage.harness import Bench, on_open, on_store


def vouched(message_id: str, user_id: str, at: int, /, **traits: Any) -> Event:
    """Return an identify event of a server key."""
    mark = {"engage": {"trusted": sorted({"email", "phone"} & traits.keys())}}
    return identify(message_id, user_id, at, traits=traits, context=mark)


class IdentifierTests:
    """``find_users`` with its claims, ``certain``, and ``holders``."""

    @on_open
    async def test_an_identifier_is_certain_while_it_is_the_value_vouched_for(
        self, store: Any
    ) -> None:
        async def certain() -> dict[str, str]:
            found = await store.certain(WORKSPACE, "u")
            profile = await store.profile(WORKSPACE, "u")
            sure = {trait: value for trait, value in found.items() if value is not None}
            assert sure == profile.certain
            assert found.keys() >= {"email", "phone"} & profile.traits.keys()
            assert not any(name.startswith("engage:") for name in profile.traits)
            return sure

        assert await store.certain(WORKSPACE, "u") == {}
        mine, other = {"email": " Ann@A.example"}, {"email": "eve@e.example"}
        # A client cannot set what engage sets.
        forged = {"engage:trusted:email": "ann@a.example", **mine}
        await store_all(store, identify("1", "u", 1, traits=forged))
        assert await certain() == {}
        # The first event with the value that a server vouches for, even if another was later.
        await store_all(store, vouched("2", "u", 0, email="ann@a.example", phone="+1 2", plan="x"))
        assert await certain() == {"email": "ann@a.example", "phone": "+12"}
        await store_all(store, identify("3", "u", 3, traits=mine))
        await store_all(store, identify("4", "eve", 3, traits=mine))
        assert await certain() == {"email": "ann@a.example", "phone": "+12"}
        assert (await store.certain(WORKSPACE, "eve"))["email"] is None
        await store_all(store, identify("5", "u", 5, traits=other))
        assert await certain() == {"phone": "+12"}
        await store_all(store, vouched("6", "u", 6, email="new@a.example"))
        # What a server replaced is not certain again.
        await store_all(store, identify("7", "u", 7, traits=mine))
        assert await certain() == {"phone": "+12"}
        await store_all(store, vouched("8", "u", 8, email=None, phone=[]))
        assert await certain() == {}
        await store_all(store, vouched("9", "u", 9, email="ann@a.example"))
        await store_all(
            store,
            identify("a", "u", 10, origin=OPERATOR_ORIGIN, removedTraits=["email"]),
            identify("b", "u", 11, traits=mine),
        )
        assert await certain() == {}

    @on_open
    async def test_a_visitor_makes_nothing_certain(self, store: Any) -> None:
        """Anyone can link a visitor to a user."""
        visit = replace(vouched("1", "", 5, email="ann@a.example"), user_id=None)
        linked = event("2", user_id="eve", anonymous_id="v")
        await store_all(store, identify("3", "eve", 1), linked)
        await store_all(store, replace(visit, anonymous_id="v"))
        profile = await store.profile(WORKSPACE, "eve")
        assert (profile.traits, profile.certain) == ({"email": "ann@a.example"}, {})
        assert (await store.certain(WORKSPACE, "eve")).get("email") is None
        assert (await store.visitor(WORKSPACE, "v")).traits == {"email": "ann@a.example"}

    @on_store
    async def test_what_is_certain_has_room(self, bench: Bench) -> None:
        limits = ProfileLimits(traits=1, trait_bytes=20)
        store: Any = await bench.open(profile_limits=limits)
        await store_all(store, identify("1", "u", 1, traits={"full": "x"}))
        await store_all(store, vouched("2", "u", 2, email="ann@a.example", phone="+1 2"))
        profile = await store.profile(WORKSPACE, "u")
        assert profile.certain == {"email": "ann@a.example", "phone": "+12"}
        assert store.dropped_changes == 0

    @on_open
    async def test_users_are_found_by_an_identifier(self, store: Any) -> None:
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
        users = await store.find_users(WORKSPACE, "email", ["ann@example.com\x00"])
        assert dict(users) == {"ann@example.com\x00": ["nul"]}
        assert dict(await store.find_users(WORKSPACE, "phone", ["+123"])) == {"+123": ["young"]}
        assert dict(await store.find_users("other", "email", wanted)) == {
            "ann@example.com": ["away"]
        }
        assert dict(await store.find_users("other", "code", [" Ann\x00b ", " Ann"])) == {
            " Ann\x00b ": ["coded"]
        }
        assert dict(await store.find_users(WORKSPACE, "email", [])) == {}

    @on_open
    async def test_users_are_not_found_by_an_earlier_value_that_arrives_late(
        self, store: Any
    ) -> None:
        await store_all(store, identify("2", "u", 20, traits={"email": "new@example.com"}))
        await store_all(store, identify("1", "u", 10, traits={"email": "old@example.com"}))
        users = await store.find_users(WORKSPACE, "email", ["old@example.com", "new@example.com"])
        assert dict(users) == {"new@example.com": ["u"]}

    @on_open
    async def test_the_history_of_an_identifier(self, store: Any) -> None:
        """It has the values of a user, and those of the visitors that belong to the user."""
        visit = identify("4", "", anonymous_id="alone", traits={"email": "a@alone.example"})
        await store_all(
            store,
            identify("1", "ann", 1, traits={"email": " Ann@New.example "}),
            identify("2", "ben", traits={"phone": "+1 (2) 3", "email": 1}),
            identify("3", "ann", workspace="other", traits={"email": "ann@other.example"}),
            replace(visit, user_id=None),
        )
        ids = ["ann", "ben", "nobody", "nul\x00"]
        history = await store.identifier_history(WORKSPACE, "email", ids)
        assert ({*history}, {*history["ann"]}) == ({"ann"}, {"ann@new.example"})
        history = await store.identifier_history(WORKSPACE, "phone", ids)
        assert ({*history}, {*history["ben"]}) == ({"ben"}, {"+123"})
        if type(store).identifier_history is Storage.identifier_history:
            return  # It has the current values of users.
        await store_all(
            store,
            # A value that arrives late was the user's, and so was one that is replaced.
            identify("5", "ann", traits={"email": "ann@old.example"}),
            identify("6", "ann", 1, traits={"email": None}),
            identify("7", "ann", 1, anonymous_id="alone", traits={"name": "Ann"}),
        )
        history = await store.identifier_history(WORKSPACE, "email", [*ids, "alone"])
        # The id of a visitor is not that of a user.
        assert {*history} == {"ann"}
        assert {*history["ann"]} == {"ann@new.example", "ann@old.example", "a@alone.example"}

    @on_open
    async def test_at_most_a_hundred_users_are_found(self, store: Any) -> None:
        await store_all(
            store,
            *(
                identify(str(number), f"u{number:03}", 200 - number, traits={"email": "a@b.c"})
                for number in range(150)
            ),
        )
        users = await store.find_users(WORKSPACE, "email", ["a@b.c"])
        assert list(users["a@b.c"]) == [f"u{number:03}" for number in range(149, 49, -1)]

    @on_open
    async def test_the_user_with_the_oldest_claim_is_found_first(self, store: Any) -> None:
        """A claim is when the server received the value, whatever the timestamps are."""
        email = {"email": "ann@example.com"}
        await store_all(store, identify("1", "ann", 100, received=100, traits=email))
        for number in range(120):
            forged = identify(f"f{number}", f"f{number}", number, received=200, traits=email)
            await store_all(store, forged)
        users = await store.find_users(WORKSPACE, "email", ["ann@example.com"])
        assert users["ann@example.com"][0] == "ann"
        # A later event with the same value, and one that was received earlier but arrives now.
        await store_all(store, identify("2", "ann", 300, received=300, traits=email))
        await store_all(store, identify("3", "earlier", 400, received=50, traits=email))
        users = await store.find_users(WORKSPACE, "email", ["ann@example.com"])
        assert list(users["ann@example.com"][:2]) == ["earlier", "ann"]

    @on_open
    async def test_a_claim_is_kept_while_the_user_has_another_value(self, store: Any) -> None:
        """Otherwise anyone could change a person's address, claim it, and keep it."""

        def address(name: str, user: str, at: int, email: str) -> Event:
            return identify(name, user, at, traits={"email": email})

        await store_all(store, address("1", "ann", 1, "ann@example.com"))
        await store_all(store, address("2", "ann", 2, "other@example.com"))
        await store_all(store, address("3", "forged", 3, "Ann@example.com"))
        wanted = ["ann@example.com", "other@example.com"]
        users = await store.find_users(WORKSPACE, "email", wanted)
        assert dict(users) == {"ann@example.com": ["forged"], "other@example.com": ["ann"]}
        await store_all(store, address("4", "ann", 4, "ann@example.com "))
        users = await store.find_users(WORKSPACE, "email", wanted)
        assert dict(users) == {"ann@example.com": ["ann", "forged"]}
        # Also an event that does not become the current value is a claim: it arrives late.
        await store_all(store, address("6", "late", 9, "late@example.com"))
        await store_all(store, address("5", "late", 0, "ann@example.com"))
        await store_all(store, address("7", "late", 10, "ann@example.com"))
        users = await store.find_users(WORKSPACE, "email", wanted)
        assert dict(users) == {"ann@example.com": ["late", "ann", "forged"]}

    @on_open
    async def test_claims_are_the_same_in_every_order(self, store: Any) -> None:
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
            users = await store.find_users(workspace, "email", ["x@y.z"])
            assert dict(users) == {"x@y.z": ["c", "a", "b"]}

    @on_store
    async def test_claims_are_kept_after_reopening(self, bench: Bench) -> None:
        store = await bench.open()
        email = {"email": "a@b.c"}
        await store_all(store, identify("1", "first", 9, traits=email))
        await store_all(store, identify("2", "second", 0, received=10, traits=email))
        await store.close()
        again = await bench.open()
        await store_all(again, identify("3", "first", 20, traits=email))
        users = await again.find_users(WORKSPACE, "email", ["a@b.c"])
        assert dict(users) == {"a@b.c": ["first", "second"]}

    @on_open
    async def test_the_first_hundred_claims_of_a_user_are_kept(self, store: Any) -> None:
        """Anyone with a write key can give a user any number of values. The claims of the first
        hundred are kept, and a later value has a claim while the user has it: from when it was
        received, whatever the timestamps are."""
        users = {"bob": 40, "eve": 1000}  # How many values are set in one write.

        def address(user: str, number: int, at: int, received: int) -> Event:
            email = {"email": f"{number}@example.com"}
            return identify(f"{user}-{number}-{at}", user, at, received=received, traits=email)

        async def found(number: int) -> list[str]:
            value = f"{number}@example.com"
            return list((await store.find_users(WORKSPACE, "email", [value])).get(value, ()))

        for first, (name, size) in enumerate(users.items()):
            base = first * 1000
            values = [address(name, base + one, one, 100 + one) for one in range(130)]
            for start in range(0, len(values), size):
                await store_all(store, *values[start : start + size])
            # The current value. The event that sets it again does not make its claim younger.
            current = base + 129
            await store_all(store, address(f"later-{name}", current, 0, 2000))
            await store_all(store, address(name, current, 2001, 2001))
            assert await found(current) == [name, f"later-{name}"]
            # The hundredth value, and the next one, which others have claimed in between.
            for number, oldest in ((base + 99, name), (base + 100, f"forged-{name}")):
                await store_all(store, address(f"forged-{name}", number, 3000 + number, 3000))
                await store_all(store, address(name, number, 3000 + number, 3001))
                assert (await found(number))[0] == oldest
            assert await found(base + 100) == [f"forged-{name}", name]
        # Also among very many users, whose timestamps are older.
        await store_all(
            store,
            *(address(f"f{one}", 1100, -one, 4000) for one in range(120)),
        )
        assert (await found(1100))[:2] == ["forged-eve", "eve"]

    @on_open
    async def test_all_holders_of_a_value_are_read(self, store: Any) -> None:
        """A signed link must work however many users have the recipient's address. A storage that
        inherits the default of ``holders`` returns at least those that ``find_users`` finds."""
        default = type(store).holders is Storage.holders
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
            holders = await all_pages(store.holders, WORKSPACE, "email", "a@b.c", limit=limit)
            assert sorted(holders) == sorted(map(user, users))
        for value in ("nobody@b.c", "a@b.c\x00", "\ud800"):
            assert await all_pages(store.holders, WORKSPACE, "email", value) == []
