# SPDX-License-Identifier: Apache-2.0
"""Any history leaves the same in a storage as in memory.

The rules are in :mod:`engage.store`, and tested there. So a storage that executes their plans as
the one in memory does keeps all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any, Final

from engage.api import OPERATOR_ORIGIN, Event, EventFilter, Kind, Subject, SubscriptionChange

from ..factories import (
    TIME,
    all_pages,
    all_recent,
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

_SPACES: Final = ("acme", "other")
_USERS: Final = ("u", "u2", "both", "ä\0")
_VISITORS: Final = ("v", "v2", "both")
_SUBJECTS: Final = (
    *(Subject(Kind.USER, name) for name in _USERS),
    *(Subject(Kind.VISITOR, name) for name in _VISITORS),
)
_EMAILS: Final = ("x@y.z", "X@y.z ", "other@y.z", 1)
_GROUPS: Final = ("news", "offers", "a.b$")
_KINDS: Final = ("key", "key\0")
_NAMES: Final = ("a", "A", "a\0", "a\0b", "é")
_ADDRESSES: Final = ("x@y.z", "x@y.z\0", "X@y.z")

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
            calls: list[_Call] = []
            for number in range(40):
                name, args, options = _any_call(chance, number, written, can_expire=can_expire)
                results = [
                    _plain(name, await getattr(target, name)(*args, **options))
                    for target in (memory, store)
                ]
                calls.append((name, args, options))
                assert results[1] == results[0], (seed, calls[-1])
                if number % 10 == 9:
                    expected, stored = await everything(memory), await everything(store)
                    for what, values in expected.items():
                        assert stored[what] == values, (seed, what, calls[-10:])
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
            again = [choose([old, dataclasses.replace(old, timestamp=TIME + 9)]) for old in again]
            written += events
            return "write", ([*events, *again],), {}
        case "apply":
            return "apply_all", ([_any_change(chance, number, at)],), {}
        case "suppress":
            fields = {"group_id": choose(["", "news"]), "reason": choose(["complaint", "bounce"])}
            fields |= {"at": TIME + choose(range(at + 1)), "lifted": choose([True, False])}
            base = suppression(choose(_ADDRESSES), workspace=space)
            return "suppress", ([dataclasses.replace(base, **fields)],), {}
        case "keep":
            letters = [letter(f"l{number}-{n}", workspace_id=space) for n in range(choose([1, 3]))]
            return "keep", (letters,), {}
        case "remove":
            return "remove", (space, [f"l{choose(range(number + 1))}-0"]), {}
        case "put_record":
            fields = {"kind": choose(_KINDS), "at": TIME + at, "body": b'{"n":%d}' % number}
            kept = record(choose(_NAMES), space, **fields)
            return "put_record", (kept,), {"expected_version": choose([None, None, 0, 1])}
        case "delete_record":
            return "delete_record", (choose(_KINDS), space, choose(_NAMES)), {}
        case "expire_records":
            return "expire_records", (choose(_KINDS), TIME + at // 2), {"limit": 2}
        case "put_counts":
            fields = {"labels": choose([("x",), ("x", ""), ("x\0",)]), "process": choose("pq")}
            fields |= {"step": choose([60, 3600]), "workspace_id": space}
            return "put_counts", ([count(choose(range(9)), minute=at, **fields)],), {}
        case "erase_events":
            gone = [event for event in written if event.user_id == "u2"][:3]
            return "erase_events", (gone, [b"mark"] * len(gone)), {}
        case "erase_profile":
            subject = choose(_SUBJECTS)
            return "erase_profile", (space, *subject), {}
        case "erase_choices":
            return "erase_choices", (space, choose(_SUBJECTS), f"erased-{number}"), {}
        case "erase_suppressions":
            return "erase_suppressions", (space, [("email", choose(_ADDRESSES))]), {}
        case "reapply":
            return "reapply", ([choose(written)] if written else [],), {}
    if can_expire and choose([True, False]):
        return "expire", (TIME + at // 2,), {"limit": 3}
    return "expire_counts", (choose([60, 3600]), TIME + at * 30_000), {"limit": 100}


_RARE: Final = (
    *("put_record", "put_record", "delete_record", "put_counts", "put_counts"),
    *("erase_events", "erase_profile", "erase_choices", "erase_suppressions", "expire"),
    *("expire_records", "reapply", "suppress"),
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
        return [(outcome.status, outcome.stored, outcome.reason is None) for outcome in result]
    return [dict(state) for state in result] if name == "apply_all" else result


async def everything(store: Any) -> dict[str, Any]:
    """Return everything that a store tells, in a form to compare: what has no order is sorted."""
    rows: dict[str, Any] = {}

    async def read(what: str, method: Any, *args: Any, **options: Any) -> list[Any]:
        items = await all_pages(functools.partial(method, **options), *args, limit=4)
        rows[what] = sorted(map(dataclasses.astuple, items), key=repr)
        return items

    for space in (None, *_SPACES):
        await read(f"users {space}", store.scan_users, space)
        await read(f"visitors {space}", store.scan_visitors, space)
        await read(f"groups {space}", store.scan_groups, space)
        await read(f"choices {space}", store.scan_subscriptions, space)
        await read(f"suppressions {space}", store.scan_suppressions, space)
        await read(f"dead letters {space}", store.scan_dead_letters, space)
        letters = await all_recent(store.recent_dead_letters, space, limit=4)
        rows[f"recent letters {space}"] = sorted(letter.id for letter in letters)
        for kind in _KINDS:
            for reverse in (False, True):
                read_records = functools.partial(store.list_records, reverse=reverse)
                records = await all_pages(read_records, kind, space, limit=4)
                rows[f"records {kind} {space} {reverse}"] = records
        for since in (0, TIME + 4):
            records = await all_pages(
                functools.partial(store.history, since=since), space, None, limit=4
            )
            # The ids of the changes of an erased person are random.
            rows[f"history {space} {since}"] = sorted(
                (
                    dataclasses.replace(row, change_id="") if _is_erased(row.subject) else row
                    for row in records
                ),
                key=lambda record: (record.workspace_id, record.subject),
            )
        for step in (60, 3600):
            times = {"since": TIME, "until": TIME + 5 * 60_000, "workspace_id": space}
            await read(f"sums {step} {space}", store.counts, step, **times)
    await read("links", store.scan_links)
    await read("counts", store.scan_counts)
    for criteria in _FILTERS:
        # A storage may return more events than are wanted.
        events = [*filter(criteria.matches, await all_pages(store.scan, criteria, limit=4))]
        recent = await all_recent(store.recent, criteria, limit=4)
        assert [*filter(criteria.matches, recent)] == events[::-1]
        rows[f"events {criteria}"] = sorted(map(canonical, events))
    for space in _SPACES:
        for name in _USERS:
            rows[f"user {space} {name}"] = await store.profile(space, name)
            rows[f"certain {space} {name}"] = dict(await store.certain(space, name))
            rows[f"linked {space} {name}"] = sorted(await store.linked_to(space, name))
        for name in _VISITORS:
            rows[f"visitor {space} {name}"] = await store.visitor(space, name)
            rows[f"links {space} {name}"] = [user for user, _ in await store.links_to(space, name)]
        for subject in _SUBJECTS:
            rows[f"state {space} {subject}"] = dict(await store.state(space, subject))
        for name in ("l0-0", "l9-0", "l20-0"):
            rows[f"letter {space} {name}"] = await store.dead_letter(space, name)
        addresses = [("email", address) for address in _ADDRESSES]
        rows[f"suppressed {space}"] = {*await store.suppressions(space, addresses)}
        for value in ("x@y.z", "other@y.z"):
            holders = await all_pages(store.holders, space, "email", value, limit=2)
            rows[f"holders {space} {value}"] = sorted(holders)
            for method in (store.find_users, store.find_visitors):
                people = await method(space, "email", [value])
                rows[f"{method.__name__} {space} {value}"] = sorted(people.get(value, ()))
        values = await store.identifier_history(space, "email", _USERS)
        rows[f"identifiers {space}"] = {name: sorted(texts) for name, texts in values.items()}
    return rows


_FILTERS: Final = (
    EventFilter(),
    EventFilter(workspace_id="acme", user_id="u"),
    EventFilter(type="identify", since=TIME + 1, until=TIME + 3),
    EventFilter(name="Clicked", origin="api"),
    EventFilter(workspace_id="other", ids=["v", "both"]),
)


def _is_erased(subject: Subject) -> bool:
    return subject.id.startswith("erased-")
