# SPDX-License-Identifier: Apache-2.0
"""Whoever has the public key and signed links of its own reaches no choice of another person, and
its links show nothing that others chose: random histories with and without it are compared."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from engage.api import Kind, Subject
from engage.errors import ApiError
from engage.keys.links import BY_ID, subscription_hash
from engage.pipeline.subscriptions import API
from engage.testing.factories import all_pages, user, visitor
from support.memory_store import MemoryStore
from support.pipeline import NOW, SECRET, make_core, send_event

#: The same text is a user of one person and a visitor of another. Only the text of a user id of
#: somebody else as an anonymous id is left out: its links unsubscribe that visitor, too.
OTHERS = (user("ann"), user("bob"), visitor("a-1"), visitor("b-1"), user("m-1"))
OWN = (user("mallory"), visitor("m-2"))
ADDRESSES = {one: f"{one.id}-{one.kind}@example.com" for one in (*OTHERS, *OWN)}
GROUPS = ("news", "offers")
LINKS: dict[Kind, str] = {kind: key for key, kind in BY_ID.items()}


@dataclasses.dataclass(frozen=True)
class Step:
    own: bool
    #: The fields of an event; or the link and the choices.
    event: dict[str, Any] | None = None
    link: dict[str, Any] | None = None
    changes: dict[str, bool] | None = None


def link_of(subject: Subject, *, by_address: bool = False) -> dict[str, Any]:
    """Return the link of a user or visitor; one by an address has the id, too."""
    key = "email" if by_address else LINKS[subject.kind]
    signed: dict[str, Any] = {
        "workspace_id": "acme",
        "identifier": ADDRESSES[subject] if by_address else subject.id,
        "identifier_key": key,
    }
    named = {"userId" if subject.kind is Kind.USER else "anonymousId": subject.id}
    return {
        "workspaceId": "acme",
        "identifier": signed["identifier"],
        "identifierKey": key,
        "hash": subscription_hash(SECRET, subject=subject, **signed),
        **named,
    }


def history(seed: int) -> list[Step]:
    """Return what people do, and what the adversary does in between."""
    some = random.Random(seed)

    def step() -> Step:
        own = some.random() < 0.6
        subjects = OWN if own else OTHERS
        if some.random() < 0.35:
            link = link_of(some.choice(subjects), by_address=some.random() < 0.4)
            chosen = some.sample(GROUPS, some.randint(1, 2))
            return Step(own, link=link, changes={one: some.random() < 0.5 for one in chosen})
        # Anyone can name any id and any address.
        known = (*OTHERS, *OWN) if own else OTHERS
        ids = [one.id for one in known]
        event: dict[str, Any] = {"type": some.choice(("identify", "track", "alias", "group"))}
        event |= {"userId": some.choice([None, *ids]), "anonymousId": some.choice([None, *ids])}
        if event["type"] == "identify":
            event["traits"] = {"email": ADDRESSES[some.choice(known)]}
        event |= {"track": {"event": "e"}, "group": {"groupId": "g"}}.get(event["type"], {})
        if event["type"] == "alias":
            event["previousId"] = some.choice(ids)
        return Step(own, event={name: value for name, value in event.items() if value})

    return [step() for _ in range(some.randint(4, 18))]


async def played(
    steps: list[Step], wanted: Callable[[Step], bool], subjects: tuple[Subject, ...]
) -> Any:
    """Return what the links of some subjects show after a history, and their history."""
    now, store = [NOW], MemoryStore()
    core = make_core(store, clock=lambda: now[0])
    for number, step in enumerate(steps):
        now[0] = NOW + 1000 * number
        if not wanted(step):
            continue
        if step.event is not None:
            with contextlib.suppress(ApiError):  # Such as one without an id.
                await send_event(core, step.event, step.event["type"])
        else:
            person = await core.pipeline.person({**(step.link or {}), "changes": {}})
            await core.pipeline.choose(person, step.changes or {}, API)
    found: dict[Any, Any] = {}
    for subject in subjects:
        for by_address in (False, True):
            person = await core.pipeline.person(link_of(subject, by_address=by_address))
            found[subject, by_address] = dict(await core.pipeline.choose(person, {}, API))
        found[subject, "suppressed"] = await core.pipeline.suppressions(person)
        records = await all_pages(store.history, "acme", subject)
        found[subject, "history"] = [dataclasses.replace(one, change_id="") for one in records]
    return found


@pytest.mark.parametrize("part", range(4))
async def test_nobody_reaches_the_choices_of_others(part: int) -> None:
    for seed in range(part, 400, 4):
        steps = history(seed)
        everything = await played(steps, lambda _: True, OTHERS)
        assert everything == await played(steps, lambda one: not one.own, OTHERS), seed
        mine = await played(steps, lambda _: True, OWN)
        assert mine == await played(steps, lambda one: one.own, OWN), seed
