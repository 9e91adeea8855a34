# SPDX-License-Identifier: Apache-2.0
"""Any history leaves the same in a storage as in memory.

The rules are in :mod:`engage.store`, and tested there. So a storage that executes their plans as
the one in memory does keeps all of them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from typing import Any, Final

from engage.api import OPERATOR_ORIGIN, Event, EventFilter, Kind, Subject, SubscriptionChange

from ..factories import (
    TIME,
    all_pages,
    canonical,
    change,
    count,
    event,
    letter,
    record,
    suppression,
)
from ..memory_store import MemoryStore
from .harness import Bench, on_store

#: Calls of a history, and how often the stores are compared meanwhile.
_CALLS: Final = 40
_COMPARED: Final = 4

_SPACES: Final = ("acme", "other")
_USERS: Final = ("u", "u2", "both", "ä\0")
_VISITORS: Final = ("v", "v2", "both")
_SUBJECTS: Final = (
    *(Subject(Kind.USER, one) for one in _USERS),
    *(Subject(Kind.VISITOR, one) for one in _VISITORS),
)
_EMAILS: Final = ("x@y.z", "X@y.z ", "other@y.z", 1)
_GROUPS: Final = ("news", "offers", "a.b$")

#: A method, its arguments, and the named ones.
_Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class HistoryTests:
    """Everything that engage keeps."""

    @on_store
    async def test_any_history_leaves_the_same_as_in_memory(self, bench: Bench) -> None:
        can_expire = bench.subject.can("expire")
        for seed in range(max(2, bench.subject.examples // 5)):
            chance = random.Random(seed)
            (folder := bench.context.base_dir / f"history {seed}").mkdir()
            await (store := bench.elsewhere(folder)()).open(create=True)
            memory = MemoryStore(context=bench.context)
            written: list[Event] = []
            for number in range(_CALLS):
                name, args, options = _any_call(chance, number, written, can_expire=can_expire)
                results = [
                    _plain(name, await getattr(one, name)(*args, **options))
                    for one in (memory, store)
                ]
                assert results[1] == results[0], (seed, number, name, args, options)
                if number % (_CALLS // _COMPARED) == _CALLS // _COMPARED - 1:
                    expected, found = await everything(memory), await everything(store)
                    for what, values in expected.items():
                        assert found[what] == values, (seed, number, what)
            await store.close()


def _any_call(
    chance: random.Random, number: int, written: list[Event], *, can_expire: bool
) -> _Call:
    """Return a call that changes something.

    :param written: the events of earlier calls.
    """
    choose: Callable[[Any], Any] = chance.choice
    space, at = choose(_SPACES), number // 4
    kind = choose(["write"] * 8 + ["apply"] * 3 + ["suppress", "keep", "remove"] + [*_RARE])
    match kind:
        case "write":
            events = [_any_event(chance, f"{number}-{n}") for n in range(choose(range(1, 6)))]
            # Some again: as they were, or another one of the same identity.
            again = [choose(written)] if written and choose([True, False]) else []
            again = [choose([one, dataclasses.replace(one, timestamp=TIME + 9)]) for one in again]
            written += events
            return "write", ([*events, *again],), {}
        case "apply":
            return "apply_all", ([_any_change(chance, number, at)],), {}
        case "suppress":
            fields = {"group_id": choose(["", "news"]), "reason": choose(["complaint", "bounce"])}
            one = suppression("x@y.z", at=at, workspace=space, lifted=choose([True, False]))
            return "suppress", ([dataclasses.replace(one, **fields)],), {}
        case "keep":
            letters = [letter(f"l{number}-{n}", workspace_id=space) for n in range(choose([1, 3]))]
            return "keep", (letters,), {}
        case "remove":
            return "remove", (space, [f"l{choose(range(number + 1))}-0"]), {}
        case "put_record":
            kept = record(choose("ab"), space, at=TIME + at, body=b'{"n":%d}' % number)
            return "put_record", (kept,), {"expected_version": choose([None, None, 0, 1])}
        case "delete_record":
            return "delete_record", ("key", space, choose("ab")), {}
        case "put_counts":
            labels = (choose("xy"),)
            counts = [count(choose(range(9)), minute=at, workspace_id=space, labels=labels)]
            return "put_counts", (counts,), {}
        case "erase_events":
            gone = [one for one in written if one.user_id == "u2"][:3]
            return "erase_events", (gone, [b"mark"] * len(gone)), {}
        case "erase_profile":
            subject = choose(_SUBJECTS)
            return "erase_profile", (space, *subject), {}
        case "erase_choices":
            return "erase_choices", (space, choose(_SUBJECTS), f"erased-{number}"), {}
        case "erase_suppressions":
            return "erase_suppressions", (space, [("email", "x@y.z")]), {}
    if can_expire and choose([True, False]):
        return "expire", (TIME + at // 2,), {"limit": 3}
    return "expire_counts", (60, TIME + at * 30_000), {"limit": 100}


_RARE: Final = (
    *("put_record", "put_record", "delete_record", "put_counts", "put_counts"),
    *("erase_events", "erase_profile", "erase_choices", "erase_suppressions", "expire"),
)


def _any_event(chance: random.Random, name: str) -> Event:
    choose: Callable[[Any], Any] = chance.choice
    fields: dict[str, Any] = {
        "at": choose(range(4)),
        "received": choose(range(4)),
        "workspace": choose(_SPACES),
        "user_id": choose([None, *_USERS]),
        "anonymous_id": choose([None, *_VISITORS]),
    }
    kind = choose(["track", "identify", "identify", "identify", "group", "alias"])
    traits: dict[str, Any] = {
        trait: choose(_EMAILS) if trait == "email" else choose(["x", {"a": [1]}, 0.5])
        for trait in choose([(), ("a",), ("email",), ("email", "a.b"), ("$c", "a")])
    }
    if kind == "identify":
        fields["traits"] = traits
        if choose([True, False]):
            fields["context"] = {"engage": {"trusted": [*{"email"} & {*traits}]}}
        elif choose([True, False, False]):
            fields |= {"origin": OPERATOR_ORIGIN, "removedTraits": ["a", "email"]}
    elif kind == "group":
        fields |= {"groupId": choose("gh"), "assigned": choose([True, True, False])}
        fields["traits"] = traits
    elif kind == "alias":
        # An operator's decision about a link.
        fields |= {"origin": OPERATOR_ORIGIN, "user_id": choose(_USERS), "anonymous_id": None}
        fields |= {"previousId": choose(_VISITORS), "linked": choose([True, False])}
    return event(name, type=kind, **fields)


def _any_change(chance: random.Random, number: int, at: int) -> SubscriptionChange:
    choose: Callable[[Any], Any] = chance.choice
    groups = {choose(_GROUPS): choose([True, False]) for _ in range(choose([1, 1, 2]))}
    # Some ids come again.
    made = change(f"c{choose([number, number // 2])}", at=at, dated=choose([False, False, True]))
    return dataclasses.replace(
        made, workspace_id=choose(_SPACES), subject=choose(_SUBJECTS), choices=groups
    )


def _plain(name: str, result: Any) -> Any:
    """Return what a call returned, in a form to compare."""
    if name == "write":
        return [(one.status, one.stored, one.reason is None) for one in result]
    return [dict(one) for one in result] if name == "apply_all" else result


async def everything(store: Any) -> dict[str, Any]:
    """Return everything that a store tells, in a form to compare: what has no order is sorted."""
    history = [
        # The id of a change of an erased person is random.
        dataclasses.replace(one, change_id="") if one.subject.id.startswith("erased-") else one
        for one in await all_pages(store.history, None, None)
    ]
    found: dict[str, Any] = {
        "events": _sorted(map(canonical, await all_pages(store.scan, EventFilter()))),
        "users": _sorted(map(dataclasses.astuple, await all_pages(store.scan_users, None))),
        "visitors": _sorted(map(dataclasses.astuple, await all_pages(store.scan_visitors, None))),
        "groups": _sorted(map(dataclasses.astuple, await all_pages(store.scan_groups, None))),
        "links": _sorted(map(dataclasses.astuple, await all_pages(store.scan_links))),
        "choices": _sorted(
            map(dataclasses.astuple, await all_pages(store.scan_subscriptions, None))
        ),
        "history": sorted(history, key=lambda one: (one.workspace_id, one.subject)),
        "suppressions": _sorted(
            map(dataclasses.astuple, await all_pages(store.scan_suppressions, None))
        ),
        "dead letters": sorted(
            await all_pages(store.scan_dead_letters, None), key=lambda one: one.id
        ),
        "records": await all_pages(store.list_records, None),
        "counts": _sorted(map(dataclasses.astuple, await all_pages(store.scan_counts))),
    }
    for space in _SPACES:
        for name in _USERS:
            found[f"certain {space} {name}"] = dict(await store.certain(space, name))
            found[f"linked {space} {name}"] = sorted(await store.linked_to(space, name))
        for name in _VISITORS:
            found[f"links {space} {name}"] = [user for user, _ in await store.links_to(space, name)]
        for value in ("x@y.z", "other@y.z"):
            found[f"holders {space} {value}"] = sorted(
                await all_pages(store.holders, space, "email", value)
            )
            for method in (store.find_users, store.find_visitors):
                people = await method(space, "email", [value])
                found[f"{method.__name__} {space} {value}"] = sorted(people.get(value, ()))
        values = await store.identifier_history(space, "email", _USERS)
        found[f"identifiers {space}"] = {name: sorted(one) for name, one in values.items()}
    return found


def _sorted(values: Iterable[Any]) -> list[Any]:
    return sorted(values, key=repr)
