# SPDX-License-Identifier: Apache-2.0
"""The promises of a :class:`~engage.store.facade.Storage` about the number of visitors."""

from __future__ import annotations

import asyncio
from typing import Any

from engage.api import ProfileLimits
from engage.testing.factories import WORKSPACE, all_pages, change, event, identify, store_all
from engage.testing.storage.harness import Bench, on_store
from support.rules.visitors import decision, visit


async def _visitors(store: Any) -> list[str]:
    return sorted(one.anonymous_id for one in await all_pages(store.scan_visitors, WORKSPACE))


async def _open(bench: Bench, limit: int) -> Any:
    limits = ProfileLimits(visitors=limit)
    return await bench.open(profile_limits=limits)


async def _fill(store: Any) -> list[str]:
    """Write visitors until one gives way to the next, and return the ids of those that are left: a
    storage may count them every five seconds, so there may be more than the limit."""
    names: list[str] = []
    before = set(await _visitors(store))
    async with asyncio.timeout(30):
        while True:
            name = f"a{len(names):03}"
            names.append(name)
            await store_all(store, visit(name, name, received=10 + len(names)))
            left = set(await _visitors(store))
            if not {*before, *names} <= left:
                break
            await asyncio.sleep(0.1)
    return sorted(left & {*names})


class VisitorLimitTests:
    """At the limit, visitors give way to new ones."""

    @on_store
    async def test_the_number_of_visitors_is_limited(self, bench: Bench) -> None:
        """A new visitor replaces the least recently changed one, and first of those without an
        identifier."""
        store = await _open(bench, 3)
        names = [f"b{number:03}" for number in range(len(await _fill(store)))]
        for number, name in enumerate(names):
            traits = {"email": f"{name}@b.c"} if number == 1 else {"a": 1}
            await store_all(store, visit(name, name, 100 + number, traits=traits))
            group = event(f"{name}g", type="group", anonymous_id=name, groupId="g", at=number)
            await store_all(store, group)
        assert await _visitors(store) == names
        await store_all(store, visit("again", names[0], 0, received=900, traits={"b": 1}))
        await store_all(store, visit("other", "other", workspace="other"))
        new = visit("new", "new", 0, received=901, traits={"email": "new@b.c"})
        await store_all(store, new)
        assert await _visitors(store) == sorted({*names, "new"} - {names[2]})
        # One that went away is made again, of the later event only.
        await store_all(store, visit("late", names[2], 0, received=902, traits={"late": 1}))
        visitor = await store.visitor(WORKSPACE, names[2])
        assert (visitor.traits, visitor.groups) == ({"late": 1}, [])
        for number, name in enumerate([*names, "new"]):
            email = {"email": f"{name}@b.c"}
            await store_all(
                store, visit(f"e{name}", name, 990, received=1000 + number, traits=email)
            )
        left = await _visitors(store)
        assert len(left) == len(names)
        assert "new" in left
        await store_all(store, visit("last", "last", 0, received=9))
        oldest = min(left, key=[*names, "new"].index)
        assert await _visitors(store) == sorted({*left, "last"} - {oldest})
        wanted = [f"{oldest}@b.c", "new@b.c"]
        assert dict(await store.find_visitors(WORKSPACE, "email", wanted)) == {"new@b.c": ["new"]}
        assert await store.visitor("other", "other") is not None
        assert store.dropped_changes == 0

    @on_store
    async def test_visitors_that_are_certain_do_not_give_way(self, bench: Bench) -> None:
        trusted: dict[str, Any] = {"context": {"engage": {"trusted": []}}}
        store = await _open(bench, 6)
        stay = ["chosen", "grouped", "owned", "trusted"]
        await store_all(store, visit("0", "chosen"))
        await store.apply(change("c", anonymous_id="chosen", news=True))
        await store_all(
            store,
            visit("1", "owned"),
            identify("2", "u", anonymous_id="owned"),
            visit("3", "trusted", **trusted),
            event("4", type="group", anonymous_id="grouped", groupId="g", **trusted),
            visit("5", "nobody's"),
            event("6", user_id="nobody", anonymous_id="nobody's"),
        )
        names = await _fill(store)
        assert await _visitors(store) == sorted({*names, *stay})
        for name in names:
            await store_all(store, identify(f"l{name}", "u", anonymous_id=name))
        await store_all(store, visit("8", "z", received=99), visit("9", "y", received=99))
        assert await _visitors(store) == sorted({*names, *stay})
        assert store.dropped_changes == 2
        await store_all(store, event("g", type="group", anonymous_id="z", groupId="h"))
        assert await store.visitor(WORKSPACE, "z") is None
        groups = await all_pages(store.scan_groups, WORKSPACE)
        assert sorted(group.group_id for group in groups) == ["g", "h"]
        assert await store.find(WORKSPACE, "api", "8") is not None
        await store_all(store, visit("v0-again", "owned", 5, traits={"a": 1}))
        assert (await store.visitor(WORKSPACE, "owned")).traits == {"a": 1}
        # It may go again.
        await store_all(store, decision("d", "u", names[0], linked=False))
        await store_all(store, visit("10", "z", received=99))
        assert await _visitors(store) == sorted({*names[1:], *stay, "z"})

    @on_store
    async def test_many_visitors_give_way_to_one_write(self, bench: Bench) -> None:
        store = await _open(bench, 4)
        fresh = [f"n{number}" for number in range(len(await _fill(store)))]
        await store.write([visit(one, one, received=100 + n) for n, one in enumerate(fresh)])
        assert await _visitors(store) == sorted(fresh)
        assert store.dropped_changes == 0
        # Nobody whom the same write changes, or gives to a user.
        await store_all(store, identify("u", "u"))
        some = [
            visit("changed", fresh[0], 1, received=200, traits={"a": 1}),
            identify("linked", "u", received=200, anonymous_id=fresh[1]),
            visit("new", "new", received=200),
        ]
        await store.write(some)
        assert await _visitors(store) == sorted({*fresh, "new"} - {fresh[2]})
        # More than there may be.
        more = [visit(f"m{number}", f"m{number}", received=300) for number in range(4 * len(fresh))]
        await store.write(more)
        left = await _visitors(store)
        assert len(left) == len(fresh)
        assert {name[0] for name in left} == {"n", "m"}
        assert fresh[1] in left
