# SPDX-License-Identifier: Apache-2.0
"""Which of two changes counts, by the whole of their versions, whichever arrives first.

The conformance suite draws events; two changes of one register are rarely in one write there.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from engage.api import Event, Status
from engage.testing import event, identify
from engage.testing.factories import ids, profile_of, store_all
from engage_plugins.sqlite.store import SqliteStorage
from support.rules.visitors import visit

#: Time, message id and origin, of which no two are a permutation of equal parts.
VERSIONS = [(0, "a", "api"), (0, "a", "sendgrid"), (0, "b", "api"), (1, "A", "api")]
PAIRS = [*itertools.permutations(VERSIONS, 2)]

together = pytest.mark.parametrize("together", [True, False], ids=["one write", "two writes"])


async def write(store: SqliteStorage, together: bool, *events: Event) -> None:
    for part in [events] if together else [(one,) for one in events]:
        await store_all(store, *part)


@together
async def test_the_greatest_version_of_a_trait_and_a_membership_wins(
    store: SqliteStorage, together: bool
) -> None:
    for number, pair in enumerate(PAIRS):
        for assigned in (True, False):
            traits, groups = f"t{number}{assigned}", f"g{number}{assigned}"
            changes: list[list[Event]] = [[], []]
            for version in pair:
                at, message_id, origin = version
                fields: dict[str, Any] = {"user_id": "u", "at": at, "origin": origin}
                changes[0].append(
                    event(
                        message_id,
                        type="identify",
                        workspace=traits,
                        traits={"version": [*version]},
                        **fields,
                    )
                )
                changes[1].append(
                    event(
                        message_id,
                        type="group",
                        workspace=groups,
                        groupId="g",
                        assigned=assigned is (version == max(pair)),
                        **fields,
                    )
                )
            for events in changes:
                await write(store, together, *events)
            assert (await profile_of(store, "u", traits)).traits == {"version": [*max(pair)]}
            assert (await profile_of(store, "u", groups)).groups == (["g"] if assigned else [])


@together
async def test_a_visitor_belongs_to_the_user_of_the_least_link(
    store: SqliteStorage, together: bool
) -> None:
    for number, pair in enumerate(PAIRS):
        workspace = f"w{number}"
        links = [
            # The later one was received, the earlier it says to have happened.
            identify(
                message_id,
                f"{version}",
                9 - received,
                received=received,
                origin=origin,
                workspace=workspace,
                anonymous_id="v",
            )
            for version in pair
            for received, message_id, origin in [version]
        ]
        await write(store, together, visit("v", "v", workspace=workspace), *links)
        visitor = await store.visitor(workspace, "v")
        assert visitor is not None
        assert visitor.user_id == f"{min(pair)}"


@together
@pytest.mark.parametrize("order", [*itertools.permutations([1, 2, 3])], ids=str)
async def test_the_least_of_the_links_of_one_user_counts(
    store: SqliteStorage, together: bool, order: tuple[int, ...]
) -> None:
    """Another user was linked after the first of them, and before the second."""
    links = [
        identify(f"{at}", "other" if at == 2 else "u", 9 - at, received=at, anonymous_id="v")
        for at in order
    ]
    await write(store, together, visit("v", "v"), *links)
    visitor = await store.visitor("acme", "v")
    assert visitor is not None
    assert visitor.user_id == "u"


async def test_an_event_whose_body_does_not_fit_its_type_is_refused_alone(
    store: SqliteStorage,
) -> None:
    bad = dataclasses.replace(event("bad", type="group", user_id="u"), body=b'{"type":"group"}')
    outcomes = await store.write([identify("a", "u"), bad, identify("b", "u")])
    assert [one.status for one in outcomes] == [Status.STORED, Status.REFUSED, Status.STORED]
    assert await ids(store) == ["a", "b"]
