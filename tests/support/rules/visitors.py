# SPDX-License-Identifier: Apache-2.0
"""The promises of a storage about visitors, in any order of arrival."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engage.api import (
    OPERATOR_ORIGIN,
    TRUSTED,
    Event,
    Kind,
    Link,
    LinkDecision,
    Membership,
    ProfileLimits,
    RemovedTraits,
    Seen,
    Subject,
    Traits,
    changes_of,
    identifier_value,
)
from engage.store.facade import Storage
from engage.testing.factories import (
    TIME,
    WORKSPACE,
    all_pages,
    change,
    event,
    identify,
    profile_of,
    store_all,
    unproven,
    user,
    visitor,
)
from engage.testing.storage.harness import Bench, on_open, on_store
from engage.testing.storage.processes import child, children_of, lines_of

#: The code of a process that writes a share of the events.
_CHILD = "from support.rules.visitors import share; share()"


def visit(message_id: str, anonymous_id: str, at: int = 0, **fields: Any) -> Event:
    """Return an identify event of a visitor."""
    return event(message_id, type="identify", anonymous_id=anonymous_id, at=at, **fields)


def decision(
    message_id: str, user_id: str, anonymous_id: str, at: int = 0, *, linked: bool, **fields: Any
) -> Event:
    """Return the event by which an operator links or unlinks an anonymous id."""
    return event(
        message_id,
        type="alias",
        user_id=user_id,
        at=at,
        origin=OPERATOR_ORIGIN,
        previousId=anonymous_id,
        linked=linked,
        **fields,
    )


class VisitorTests:
    """Visitors, and whom they belong to."""

    @on_open
    async def test_a_visitor_has_a_profile(self, store: Any) -> None:
        await store_all(
            store,
            visit("1", "v", 10, traits={"email": "a@b.c", "plan": "free"}),
            visit("2", "v", 20, traits={"plan": "pro"}),
            event("3", type="group", anonymous_id="v", groupId="g", at=5),
            event("4", type="group", anonymous_id="v", groupId="h", at=5),
            event("5", type="group", anonymous_id="v", groupId="h", at=6, assigned=False),
            event("6", anonymous_id="seen", at=1),
            visit("7", "null", traits={"a": 1}),
            visit("8", "email:a@b.c", traits={"a": 1}),
            visit("9", "phone:+1", traits={"a": 1}),
            event("a", type="group", anonymous_id="w", groupId="undefined", at=7),
            visit("b", "v", workspace="other", traits={"a": 1}),
        )
        found = {one.anonymous_id: one for one in await all_pages(store.scan_visitors, WORKSPACE)}
        assert sorted(found) == ["v", "w"]
        one = found["v"]
        assert one.traits == {"email": "a@b.c", "plan": "pro"}
        assert (one.updated_at - one.created_at, one.groups, one.user_id) == (15, ["g"], None)
        assert await store.visitor(WORKSPACE, "v") == one
        assert await store.visitor(WORKSPACE, "seen") is None
        assert await all_pages(store.scan_users, None) == []
        assert await store.profile(WORKSPACE, "v") is None
        found = await store.find_visitors(WORKSPACE, "email", ["a@b.c", "x@b.c"])
        assert dict(found) == {"a@b.c": ["v"]}
        assert dict(await store.find_users(WORKSPACE, "email", ["a@b.c"])) == {}
        assert await all_pages(store.holders, WORKSPACE, "email", "a@b.c") == [visitor("v")]

    @on_open
    async def test_a_visitor_belongs_to_the_user_of_the_first_link(self, store: Any) -> None:
        traits = {"email": "a@b.c", "name": "visitor", "code": 1}
        await store_all(store, visit("1", "v", 10, traits=traits))
        # The owner does not exist yet.
        await store_all(store, event("2", user_id="late", anonymous_id="v", received=50))
        assert (await store.visitor(WORKSPACE, "v")).user_id is None
        assert dict(await store.find_visitors(WORKSPACE, "email", ["a@b.c"])) == {"a@b.c": ["v"]}
        await store_all(store, identify("3", "late", 20, traits={"name": "user"}))
        profile = await profile_of(store, "late")
        assert profile.traits == {"email": "a@b.c", "name": "user", "code": 1}
        assert profile.anonymous_ids == ["v"]
        assert (await store.visitor(WORKSPACE, "v")).user_id == "late"
        assert dict(await store.find_users(WORKSPACE, "email", ["a@b.c"])) == {"a@b.c": ["late"]}
        assert dict(await store.find_visitors(WORKSPACE, "email", ["a@b.c"])) == {}
        assert await all_pages(store.holders, WORKSPACE, "email", "a@b.c") == [visitor("v")]
        # An earlier link arrives late; its timestamp does not count, its time of receipt does.
        await store_all(store, identify("4", "early", 90, received=40, anonymous_id="v"))
        await store_all(store, identify("5", "forged", 0, received=60, anonymous_id="v"))
        for name, has in (("early", True), ("late", False), ("forged", False)):
            profile = await profile_of(store, name)
            assert ("email" in profile.traits) is has
            assert profile.anonymous_ids == ["v"]
        users = await store.find_users(WORKSPACE, "email", ["a@b.c"])
        assert dict(users) == {"a@b.c": ["early"]}

    @on_open
    async def test_a_value_finds_a_person_only_if_it_wins(self, store: Any) -> None:
        def email(name: str) -> dict[str, str]:
            return {"email": f"{name}@b.c"}

        await store_all(
            store,
            visit("1", "v", 10, traits=email("old")),
            identify("2", "u", 20, anonymous_id="v", traits=email("new")),
            visit("3", "w", 5, received=50, traits=email("new")),
            identify("4", "other", 30, traits=email("new")),
        )
        wanted = ["old@b.c", "new@b.c"]
        users = await store.find_users(WORKSPACE, "email", wanted)
        assert dict(users) == {"new@b.c": ["u", "other"]}
        # The claim of a visitor is the person's.
        await store_all(store, visit("5", "x", 1, received=1, traits=email("new")))
        await store_all(store, event("6", user_id="other", anonymous_id="x"))
        users = await store.find_users(WORKSPACE, "email", wanted)
        assert dict(users) == {"new@b.c": ["other", "u"]}
        assert dict(await store.find_visitors(WORKSPACE, "email", wanted)) == {"new@b.c": ["w"]}
        held = await all_pages(store.holders, WORKSPACE, "email", "new@b.c")
        assert sorted(held) == [user("other"), user("u"), visitor("w"), visitor("x")]
        assert [one.kind for one in held] == [Kind.USER] * 2 + [Kind.VISITOR] * 2
        await store_all(store, visit("7", "v", 40, traits=email("old")))
        users = await store.find_users(WORKSPACE, "email", wanted)
        assert dict(users) == {"new@b.c": ["other"], "old@b.c": ["u"]}

    @on_open
    async def test_an_operator_undoes_a_link(self, store: Any) -> None:
        await store_all(store, visit("1", "v", 1, traits={"a": 1}))
        await store_all(store, identify("2", "u", 2, anonymous_id="v"))
        await store_all(store, identify("3", "next", 3, anonymous_id="v"))
        await store_all(store, decision("4", "u", "v", 4, linked=False))
        # It holds against all events of clients.
        for at in (0, 9):
            await store_all(store, identify(f"c{at}", "u", at, anonymous_id="v"))
            forged = event(f"f{at}", type="alias", user_id="u", previousId="v", linked=True, at=at)
            await store_all(store, forged)

        async def traits() -> Any:
            users = [await profile_of(store, name) for name in ("u", "next")]
            return [(dict(one.traits), one.anonymous_ids) for one in users]

        assert await traits() == [({}, []), ({"a": 1}, ["v"])]
        await store_all(store, decision("5", "next", "v", 5, linked=False))
        assert await traits() == [({}, []), ({}, [])]
        assert (await store.visitor(WORKSPACE, "v")).user_id is None
        await store_all(store, decision("6", "u", "v", 6, linked=True))
        assert await traits() == [({"a": 1}, ["v"]), ({}, [])]
        # Of a pair that no event linked, and in the wrong order.
        await store_all(store, decision("7", "new", "w", 7, linked=True), visit("8", "w"))
        await store_all(store, identify("9", "new", 8), decision("a", "new", "w", linked=False))
        assert (await store.visitor(WORKSPACE, "w")).user_id == "new"
        await store_all(store, decision("b", "nobody", "w", 9, linked=False))
        assert await store.profile(WORKSPACE, "nobody") is None

    @on_open
    async def test_an_anonymous_id_may_be_the_id_of_another_user(self, store: Any) -> None:
        await store_all(store, visit("1", "both", 1, traits={"a": 1}))
        await store_all(store, identify("2", "u", 2, anonymous_id="both"))
        profile = await profile_of(store, "u")
        assert (profile.traits, profile.anonymous_ids) == ({"a": 1}, ["both"])
        await store_all(store, identify("3", "both", 3, traits={"b": 2}))
        profile = await profile_of(store, "u")
        assert (profile.traits, profile.anonymous_ids) == ({"a": 1}, ["both"])
        profile = await profile_of(store, "both")
        assert (profile.traits, profile.anonymous_ids) == ({"b": 2}, [])
        found = await store.visitor(WORKSPACE, "both")
        assert (found.traits, found.user_id) == ({"a": 1}, "u")

    @on_store
    async def test_limits_of_visitors(self, bench: Bench) -> None:
        limits = ProfileLimits(
            traits=4,
            trait_bytes=200,
            memberships=3,
            visitor_traits=2,
            visitor_trait_bytes=100,
            visitor_memberships=1,
            user_visitors=2,
        )
        store = await bench.open(profile_limits=limits)
        for number, name in enumerate(("v", "w", "x")):
            await store_all(store, visit(f"{name}1", name, traits={f"{name}1": 1}))
            await store_all(store, visit(f"{name}2", name, traits={f"{name}2": 1}))
            await store_all(store, visit(f"{name}3", name, traits={f"{name}3": 1}))
            await store_all(store, visit(f"{name}4", name, at=1, traits={f"{name}2": "x" * 100}))
            for group in ("g", "h"):
                await store_all(
                    store,
                    event(
                        f"{name}{group}",
                        type="group",
                        anonymous_id=name,
                        groupId=f"{name}{group}",
                    ),
                )
            assert store.dropped_changes == 3 * (number + 1)
            await store_all(store, visit(f"{name}5", name, traits={"email": f"{name}@b.c"}))
            await store_all(
                store, identify(f"{name}6", "u", received=10 + number, anonymous_id=name)
            )
        await store_all(store, identify("own", "u", traits={"b": 1, "a": 1, "c": 1}))
        assert store.dropped_changes == 9
        profile = await profile_of(store, "u")
        # Names of the user first, then those of the visitors in the order of their links.
        assert dict(profile.traits) == {"a": 1, "b": 1, "c": 1, "v1": 1, "email": "w@b.c"}
        assert profile.groups == ["vg", "wg"]
        assert profile.anonymous_ids == ["v", "w", "x"]
        assert profile.left_out == 3
        # The third visitor is not merged, so nobody is found by its address.
        users = await store.find_users(WORKSPACE, "email", ["w@b.c", "x@b.c"])
        assert dict(users) == {"w@b.c": ["u"]}

    @on_open
    async def test_old_visitors_that_belong_to_nobody_expire(self, store: Any) -> None:
        await store_all(
            store,
            visit("1", "old", 90, received=10, traits={"email": "a@b.c"}),
            visit("2", "young", 0, received=20),
            visit("3", "changed", 0, received=10),
            visit("4", "changed", 0, received=20),
            visit("5", "owned", 0, received=10, traits={"a": 1}),
            identify("6", "u", anonymous_id="owned"),
            visit("7", "unowned", 0, received=10),
            event("8", user_id="nobody", anonymous_id="unowned"),
        )
        before = (await store.find(WORKSPACE, "api", "2")).received_at
        assert await store.expire_visitors(before, limit=1) == 1
        assert await store.expire_visitors(before, limit=10) == 1
        assert await store.expire_visitors(before, limit=10) == 0
        visitors = await all_pages(store.scan_visitors, WORKSPACE)
        assert sorted(one.anonymous_id for one in visitors) == ["changed", "owned", "young"]
        assert dict(await store.find_visitors(WORKSPACE, "email", ["a@b.c"])) == {}
        assert await all_pages(store.holders, WORKSPACE, "email", "a@b.c") == []
        await store_all(store, visit("9", "old", 0, received=30, traits={"b": 1}))
        assert (await store.visitor(WORKSPACE, "old")).traits == {"b": 1}

    @on_open
    async def test_a_visitor_who_chose_does_not_expire(self, store: Any) -> None:
        """Otherwise its links by an address would not find it any more."""
        if Storage not in type(store).__mro__:
            pytest.skip("this storage is not a Storage")
        await store_all(store, visit("1", "v", received=1), visit("2", "w", received=1))
        await store.apply(change("c1", anonymous_id="v", at=1, news=False))
        await store.apply(change("c2", user_id="w", at=1, news=False))
        assert await store.expire_visitors(TIME + 2, limit=2) == 1
        assert await store.visitor(WORKSPACE, "v") is not None
        assert dict(await store.state(WORKSPACE, visitor("v"))) == {"news": False}

    @on_open
    async def test_a_choice_crosses_to_no_other_id(self, store: Any) -> None:
        """Links merge profiles, whoever made them, and in whatever order; choices stay apart."""
        if Storage not in type(store).__mro__:
            pytest.skip("this storage is not a Storage")
        await store.apply(change("c1", anonymous_id="v", at=5, news=True, ads=True))
        await store_all(store, visit("1", "v", traits={"email": "a@b.c"}))
        await store_all(store, identify("2", "u", anonymous_id="v"))
        await store.apply(change("c2", user_id="u", at=4, news=False))
        await store_all(store, event("3", user_id="w", anonymous_id="v", received=-9))
        await store_all(store, identify("4", "w"), identify("5", "v"))
        for linked in (True, False):
            assert dict(await store.state(WORKSPACE, user("u"))) == {"news": False}
            assert dict(await store.state(WORKSPACE, visitor("v"))) == {"news": True, "ads": True}
            for name in ("v", "w"):
                assert dict(await store.state(WORKSPACE, user(name))) == {}
            await store_all(store, decision(f"6{linked}", "u", "v", linked=linked))
        assert [one.before for one in await all_pages(store.history, WORKSPACE, None)] == [None] * 3

    @on_open
    async def test_each_choice_is_that_of_its_last_record(self, store: Any) -> None:
        if Storage in type(store).__mro__:
            await store_all(store, identify("1", "u", anonymous_id="v"), visit("2", "v"))
        chance = random.Random(26)
        for number in range(120):
            one = change(
                f"c{number % 100}",
                user_id=chance.choice("uuvw"),
                anonymous_id=chance.choice([None, None, "v", "w"]),
                at=chance.randrange(100),
                dated=chance.random() < 0.3,
            )
            choices = {group: chance.random() < 0.5 for group in chance.sample("abc", 2)}
            await store.apply(dataclasses.replace(one, choices=choices))
            assert await unproven(store) == []
        assert len(await all_pages(store.scan_subscriptions, None)) == 15

    @on_open
    async def test_a_choice_makes_a_user_exist_beside_a_visitor(self, store: Any) -> None:
        if Storage not in type(store).__mro__:
            pytest.skip("this storage is not a Storage")
        await store_all(store, visit("1", "v", traits={"a": 1}), identify("2", "u"))
        await store_all(store, event("3", user_id="u", anonymous_id="v"))
        await store.apply(change("1", user_id="v", at=5, news=True))
        profile = await profile_of(store, "v")
        assert (profile.created_at, profile.updated_at) == (TIME + 5, TIME + 5)
        assert profile.traits == {}
        assert (await store.visitor(WORKSPACE, "v")).user_id == "u"
        assert (await profile_of(store, "u")).traits == {"a": 1}
        await store_all(store, identify("4", "v", 9))
        profile = await profile_of(store, "v")
        assert profile.updated_at - profile.created_at == 4

    @on_store
    async def test_several_processes_write_the_halves_of_people(self, bench: Bench) -> None:
        """Events of user, visitor and link arrive in any order, and each of them at one process."""
        bench.require("several-processes")
        bench.require("atomic-updates")
        workspaces = [f"w{number}" for number in range(bench.subject.examples)]
        identifiers = dict.fromkeys(workspaces, ("email",))
        bench.context = dataclasses.replace(bench.context, identifiers=identifiers)
        store = await bench.open()
        jobs = [{"share": share} for share in range(4)]
        async with children_of(bench, *jobs, code=_CHILD) as children:
            for lines in await asyncio.gather(*(lines_of(one) for one in children)):
                assert lines == ["done"]
        for name in workspaces:
            expected = people_of(history(random.Random(name).choice, name))
            assert await people_in(store, name) == expected, name

    def test_people_are_merged_in_every_order(self: Any, tmp_path: Path) -> None:
        """Any events, in any order and any writes, make the same people."""
        numbers = itertools.count()
        with Bench(self, tmp_path) as bench:
            # Hypothesis needs more of them to make a failing example smaller.
            declared = {f"w{number}": ("email",) for number in range(50 * self.examples)}
            store = bench.run(bench.open(identifiers=declared))

            @settings(
                max_examples=self.examples,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(st.data())
            def check(data: st.DataObject) -> None:
                workspace = f"w{next(numbers)}"
                events = history(lambda some: data.draw(st.sampled_from(some)), workspace)
                arrivals = data.draw(st.permutations(events))
                sizes = data.draw(st.lists(st.integers(1, 6), max_size=8))
                bench.run(arrive(store, arrivals, sizes))
                assert bench.run(people_in(store, workspace)) == people_of(events)

            check()


_NAMES = ("a", "b", "email", "email")
_TRAITS = ((), ("a",), ("email",), ("b", "email"))
_VALUES = ("x@y.z", "X@y.z ", "other@y.z", 1)
_TIMES = (0, 0, 1, 2)
_USERS = ("u", "u2", "both")
_VISITORS = ("v", "v2", "v3", "both")


def history(choose: Callable[[Sequence[Any]], Any], workspace: str) -> list[Event]:
    """Return the events of a few people who have ids in common, as ``choose`` chooses."""
    found = []
    for number in range(choose(range(2, 13))):
        kind = choose(["visit", "visit", "identify", "link", "group", "decision"])
        user, visitor = choose(_USERS), choose(_VISITORS)
        fields: dict[str, Any] = {"at": choose(_TIMES), "received": choose(_TIMES)}
        fields |= {"workspace": workspace, "user_id": user, "anonymous_id": visitor}
        if kind in ("visit", "group") and choose([True, False]):
            fields["user_id"] = None
        if kind in ("visit", "identify"):
            if kind == "identify":
                fields["anonymous_id"] = choose([None, visitor])
            elif choose([False, False, True]):
                fields |= {"origin": OPERATOR_ORIGIN, "removedTraits": [choose(_NAMES)]}
            traits = {name: choose(_VALUES) for name in choose(_TRAITS)}
            fields |= {"type": "identify", "traits": traits}
            if choose([True, False]):
                fields["context"] = {"engage": {"trusted": [*{"email"} & {*traits}]}}
        elif kind == "group":
            fields |= {"type": "group", "groupId": choose("gh")}
            fields["assigned"] = choose([True, False])
        elif kind == "decision":
            fields |= {"type": "alias", "origin": OPERATOR_ORIGIN, "previousId": visitor}
            fields |= {"anonymous_id": None, "linked": choose([True, False])}
        found.append(event(f"{choose('ab')}{number}", **fields))
    return found


async def arrive(store: Storage, events: list[Event], sizes: Iterable[int]) -> None:
    """Write events in parts."""
    start = 0
    for size in [*sizes, len(events)]:
        if events[start : start + size]:
            await store.write(events[start : start + size])
        start += size


def share() -> None:
    """Write a share of the events of people; in a process of its own."""

    async def work(store: Any, job: dict[str, Any]) -> None:
        names = job["context"]["identifiers"]
        events = [one for name in names for one in history(random.Random(name).choice, name)]
        random.Random("order").shuffle(events)
        await arrive(store, events[job["share"] :: 4], [len(names)] * len(events))

    child(work)


async def people_in(store: Storage, workspace: str) -> Any:
    """Return everything that a store tells about the people of a workspace."""
    users = {one.user_id: one for one in await all_pages(store.scan_users, workspace)}
    visitors = {one.anonymous_id: one for one in await all_pages(store.scan_visitors, workspace)}
    for name in _USERS:
        assert await store.profile(workspace, name) == (user := users.get(name))
        certain = await store.certain(workspace, name)
        assert certain.get("email") == (None if user is None else user.certain.get("email"))
    for name in _VISITORS:
        assert await store.visitor(workspace, name) == visitors.get(name)
    wanted = ["x@y.z", "other@y.z"]
    found = await store.find_users(workspace, "email", wanted)
    alone = await store.find_visitors(workspace, "email", wanted)
    return (
        {
            name: (
                *(dict(one.traits), one.certain, one.anonymous_ids),
                *(one.groups, one.created_at, one.updated_at),
            )
            for name, one in users.items()
        },
        {
            name: (dict(one.traits), one.user_id, one.groups, one.created_at, one.updated_at)
            for name, one in visitors.items()
        },
        # Those with equal claims are in any order.
        {value: sorted(names) for value, names in found.items()},
        {value: sorted(names) for value, names in alone.items()},
        {
            value: sorted(await all_pages(store.holders, workspace, "email", value, limit=2))
            for value in wanted
        },
    )


def people_of(events: list[Event]) -> Any:
    """Return the same, computed in a simple way: in the order of the versions, later changes over
    earlier ones."""
    times: dict[tuple[Kind, str], list[int]] = {}
    traits: dict[tuple[Kind, str], dict[str, tuple[Any, Any]]] = {}
    members: dict[tuple[Kind, str], dict[str, tuple[Any, bool]]] = {}
    links: dict[tuple[str, str], list[Any]] = {}
    undone: dict[tuple[str, str], bool] = {}
    for one in sorted(events, key=lambda one: (one.timestamp, one.message_id, one.origin)):
        version = (one.timestamp, one.message_id, one.origin)
        for made in changes_of(one):
            match made:
                case Seen(kind, name):
                    times.setdefault((kind, name), []).append(one.timestamp)
                case Traits(kind, name, values):
                    known = traits.setdefault((kind, name), {})
                    known.update({trait: (version, value) for trait, value in values.items()})
                case RemovedTraits(kind, name, names):
                    known = traits.setdefault((kind, name), {})
                    known.update(dict.fromkeys(names, (version, _GONE)))
                case Membership(kind, name, group, assigned):
                    members.setdefault((kind, name), {})[group] = (version, assigned)
                case Link(user, anonymous):
                    first = (one.received_at, one.message_id, one.origin)
                    links.setdefault((user, anonymous), []).append(first)
                case LinkDecision(user, anonymous, counts):
                    undone[user, anonymous] = not counts
    exists = {name for kind, name in times if kind is Kind.USER}
    counting = {pair: min(link) for pair, link in links.items() if not undone.get(pair)}

    def owner(visitor: str) -> str | None:
        firsts = [(first, pair[0]) for pair, first in counting.items() if pair[1] == visitor]
        found = min(firsts)[1] if firsts else None
        return found if found in exists else None

    def latest(registers: Mapping[Any, Any], subjects: Iterable[Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for subject in subjects:
            for name, register in registers.get(subject, {}).items():
                found[name] = max(found.get(name, register), register, key=lambda one: one[0])
        return {name: value for name, (_, value) in found.items()}

    def present(values: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: value for name, value in values.items() if value is not _GONE}
        return {name: value for name, value in found.items() if not name.startswith(TRUSTED)}

    users, visitors = {}, {}
    found: dict[str, list[str]] = {}
    alone: dict[str, list[str]] = {}
    held: dict[str, set[Subject]] = {"x@y.z": set(), "other@y.z": set()}
    for (kind, name), at in times.items():
        if kind is Kind.GROUP:
            continue
        subjects: list[tuple[Kind, str]] = [(kind, name)]
        if kind is Kind.USER:
            subjects += [one for one in times if one[0] is Kind.VISITOR and owner(one[1]) == name]
        values = present(latest(traits, subjects))
        groups = sorted(group for group, member in latest(members, subjects).items() if member)
        last = max(at for subject in subjects for at in times[subject])
        form = identifier_value("email", values.get("email"))
        own = identifier_value("email", present(latest(traits, [(kind, name)])).get("email"))
        held.get(own or "", set()).add(Subject(kind, name))
        if kind is Kind.USER:
            linked = sorted(pair[1] for pair in counting if pair[0] == name)
            vouched = latest(traits, [(kind, name)]).get(f"{TRUSTED}:email", _GONE)
            sure = {"email": own} if own and own == vouched else {}
            users[name] = (values, sure, linked, groups, min(at), last)
            if form is not None:
                found.setdefault(form, []).append(name)
        else:
            visitors[name] = (values, owner(name), groups, min(at), last)
            if form is not None and owner(name) is None:
                alone.setdefault(form, []).append(name)
    return (
        users,
        visitors,
        {value: sorted(names) for value, names in found.items()},
        {value: sorted(names) for value, names in alone.items()},
        {value: sorted(names) for value, names in held.items()},
    )


_GONE = object()
