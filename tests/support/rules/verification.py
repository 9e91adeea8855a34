# SPDX-License-Identifier: Apache-2.0
"""The promises of a :class:`~engage.store.facade.Storage`."""

from __future__ import annotations

from typing import Any

from engage.api import API_ORIGIN, OPERATOR_ORIGIN, Kind, StoredLink, StoreProblem
from engage.testing.factories import (
    AWKWARD,
    TIME,
    WORKSPACE,
    all_pages,
    event,
    identify,
    letter,
    store_all,
)
from engage.testing.storage.harness import on_open
from support.rules.visitors import decision, visit


def _by_name(link: StoredLink) -> tuple[str, str]:
    return link.user_id, link.anonymous_id


class VerificationTests:
    """``problems``, ``scan_links``, ``scan_rows``, ``unfinished``."""

    @on_open
    async def test_a_healthy_store_has_no_problems(self, store: Any) -> None:
        awkward = [
            event(f"e{n}", user_id=text, anonymous_id=f"{text}{n}", at=n)
            for n, text in enumerate(AWKWARD)
        ]
        people = [
            identify(f"i{n}", text, traits={"email": f"{n}@b.c", text: 1}, groupId="g")
            for n, text in enumerate(AWKWARD)
        ]
        visitors = [
            event(f"v{n}", type="identify", anonymous_id=text, traits={"phone": "+1"})
            for n, text in enumerate(AWKWARD)
        ]
        groups = [event("g", type="group", user_id="u", groupId="g", traits={"a": 1})]
        await store_all(store, *awkward, *people, *visitors, *groups)
        if hasattr(store, "keep"):
            await store.keep([letter("a"), letter("b", origin="twilio", headers=[("x", "y")])])
        problems = [problem async for problem in store.problems()]
        assert [problem for problem in problems if isinstance(problem, StoreProblem)] == []
        assert sum(one for one in problems if isinstance(one, int)) >= len(awkward) + len(people)
        assert {workspace for workspace, _ in await store.unfinished()} <= {WORKSPACE}

    @on_open
    async def test_an_empty_store_has_no_problems(self, store: Any) -> None:
        assert [one async for one in store.problems() if isinstance(one, StoreProblem)] == []
        assert await all_pages(store.scan_links) == []
        assert not await store.unfinished()

    @on_open
    async def test_a_link_has_its_first_event(self, store: Any) -> None:
        await store_all(
            store,
            event("b", user_id="u", anonymous_id="a", at=5),
            event("c", user_id="u", anonymous_id="a", at=3),
            event("a", user_id="u", anonymous_id="a", at=3, origin="twilio"),
            event("d", user_id="w", anonymous_id="a", at=9, workspace="other"),
        )
        wanted = [
            (WORKSPACE, "u", (TIME + 3, "a", "twilio")),
            ("other", "w", (TIME + 9, "d", API_ORIGIN)),
        ]
        assert sorted(await all_pages(store.scan_links), key=_by_name) == [
            StoredLink(
                workspace_id=workspace, user_id=user, anonymous_id="a", first=first, counts=True
            )
            for workspace, user, first in wanted
        ]

    @on_open
    async def test_a_link_has_an_operators_decision(self, store: Any) -> None:
        await store_all(
            store,
            event("a", user_id="u", anonymous_id="x", at=1),
            decision("b", "u", "x", linked=False, at=2),
            decision("c", "u", "y", linked=False, at=3),
            decision("d", "u", "z", linked=True, at=4),
        )
        links = {link.anonymous_id: link for link in await all_pages(store.scan_links)}
        assert {name: value.counts for name, value in links.items()} == {
            "x": False,
            "y": False,
            "z": True,
        }
        assert links["x"].first == (TIME + 1, "a", "api")
        assert links["y"].first is None
        assert links["z"].first == (TIME + 4, "d", OPERATOR_ORIGIN)

    @on_open
    async def test_all_links_are_scanned_once(self, store: Any) -> None:
        pairs = [(user, f"{text}-") for user in ("u", "w") for text in AWKWARD]
        events = [
            event(f"m{n}", user_id=user, anonymous_id=name, at=n)
            for n, (user, name) in enumerate(pairs)
        ]
        await store_all(store, *events)
        for limit in (1, 7, 1000):
            links = await all_pages(store.scan_links, limit=limit)
            assert sorted(map(_by_name, links)) == sorted(pairs)

    @on_open
    async def test_people_are_scanned_once_as_they_are_stored(self, store: Any) -> None:
        await store_all(
            store,
            identify("1", "u", anonymous_id="v", traits={"a": 1}),
            identify("2", "u", 5, traits={"a": 2}),
            visit("3", "v", traits={"b": 1}),
            event("4", type="group", user_id="u", groupId="g", traits={"c": 1}),
        )
        for limit in (1, 100):
            found = {kind: await all_pages(store.scan_rows, kind, limit=limit) for kind in Kind}
            for kind, name, trait, groups in (
                (Kind.USER, "u", ("a", TIME + 5, b"2", "2"), [("g", TIME, "4", API_ORIGIN, 1)]),
                (Kind.VISITOR, "v", ("b", TIME, b"1", "3"), []),
                (Kind.GROUP, "g", ("c", TIME, b"1", "4"), []),
            ):
                ((row, traits, memberships),) = found[kind]
                assert (row[2], row[3]) == (name, TIME)
                assert [one[3:7] for one in traits] == [trait]
                assert [membership[3:] for membership in memberships] == groups
