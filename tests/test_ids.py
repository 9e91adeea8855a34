# SPDX-License-Identifier: Apache-2.0
"""Of two items without times the later wins: the message ids that the server makes ascend."""

from __future__ import annotations

import importlib
import itertools
import json
import uuid
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engage.ids import AscendingIds, idempotent_id
from support.pipeline import Core, deliver, make_core, send_batch, send_event
from support.providers import request

TIMES = st.integers(0, 2**48 - 1)


@given(TIMES)
def test_the_first_id_has_the_time(milliseconds: int) -> None:
    parsed = uuid.UUID(AscendingIds()(milliseconds or 1))
    assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
    assert parsed.int >> 80 == (milliseconds or 1)


@given(st.lists(TIMES, min_size=2, max_size=50))
def test_ids_ascend_whatever_the_clock_does(times: list[int]) -> None:
    make_id = AscendingIds()
    made = [make_id(time) for time in times]
    assert made == sorted(set(made))
    for text in made:
        parsed = uuid.UUID(text)
        assert (parsed.version, parsed.variant, str(parsed)) == (7, uuid.RFC_4122, text)


def test_ids_ascend_within_a_millisecond_beyond_its_random_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For example while a clock that was set back stands still. The steps are large here."""
    sizes = itertools.chain([10], itertools.repeat(13))
    monkeypatch.setattr("engage.ids.os.urandom", lambda _: b"\xff" * next(sizes))
    make_id = AscendingIds()
    made = [make_id(1000) for _ in range(10)]
    assert made == sorted(set(made))
    assert uuid.UUID(made[-1]).int >> 80 > 1000


def test_the_next_id_cannot_be_guessed() -> None:
    make_id = AscendingIds()
    numbers = [uuid.UUID(make_id(5)).int for _ in range(1000)]
    steps = {later - earlier for earlier, later in itertools.pairwise(numbers)}
    assert len(steps) == 999
    assert sum(steps) / 999 > 2**46


def test_the_ids_of_an_idempotency_key_ascend_with_the_index() -> None:
    made = [idempotent_id("acme", "k", index) for index in range(2500)]
    assert made == sorted(set(made))
    assert made[0] == str(
        uuid.uuid5(uuid.UUID("6c1f8a0e-52d5-5a53-9d0b-3b6f2f1d7c11"), "4:acme1:k0")
    )
    assert not set(made) & {idempotent_id("acme", "k1", index) for index in range(2500)}


# ----------------------------------------------------------------------------- the later one wins
def identify(plan: int, user: str = "u") -> dict[str, Any]:
    """Return an item without a time and a message id."""
    return {"type": "identify", "userId": user, "traits": {"plan": plan}}


async def plan_of(core: Core, user: str = "u") -> Any:
    """Return the trait that was set last."""
    profile = await core.store.profile("acme", user)
    assert profile is not None
    return profile.traits["plan"]


@pytest.mark.parametrize("key", [None, "k"])
async def test_the_later_item_of_a_batch_wins(key: str | None) -> None:
    """Finding 12: it won 92 of 200."""
    core = make_core()
    wins = 0
    for number in range(200):
        header = None if key is None else f"{key}{number}"
        # Ids of different keys do not ascend, so each key has a user.
        user = "u" if key is None else f"u{number}"
        items = [identify(2 * number, user), identify(2 * number + 1, user)]
        await send_batch(core, items, idempotency_key=header)
        wins += await plan_of(core, user) == 2 * number + 1
    assert wins == 200


async def test_the_later_of_two_requests_in_one_millisecond_wins() -> None:
    core = make_core()
    for number in range(200):
        await send_event(core, identify(number), "identify")
        assert await plan_of(core) == number


@pytest.mark.parametrize("provider", ["segment", "rudderstack"])
def test_elements_without_ids_and_times_ascend(provider: str) -> None:
    translate = translator(provider)
    items = [identify(number) for number in range(200)]
    made = translate(items)
    assert made == sorted(set(made))
    assert translate(items) == made
    assert translate([items[0]]) != translate([items[1]])
    timed = [{**item, "timestamp": "2020-01-01T00:00:00Z"} for item in items]
    # With a time, an element has the same id in whatever delivery it comes.
    assert translate(timed)[7] == translate([timed[7]])[0]


def translator(name: str) -> Any:
    """Return a function from elements to the message ids of their events."""
    module = importlib.import_module(f"engage_plugins.{name}")
    provider = getattr(module, {"segment": "Segment", "rudderstack": "RudderStack"}[name])

    def translate(items: list[Any]) -> list[str]:
        made = provider.translate(object.__new__(provider), request(orjson.dumps(items)))
        return [event.document["messageId"] for event in made.events]

    return translate


# ----------------------------------------------------------------------------------- write keys
async def test_a_write_key_is_not_stored_wherever_it_stands() -> None:
    core = make_core()
    deep: Any = {"writeKey": "key-1", "kept": [{"writeKey": "key-1", "a": "writeKey"}]}
    event = {
        "type": "track",
        "userId": "u",
        "event": "writeKey",
        "writeKey": "key-1",
        "context": {**deep, "page": deep},
        "properties": deep,
    }
    await send_event(core, event)
    await send_batch(core, [event], {"context": {"app": deep, "writeKey": "key-1"}})
    await send_batch(core, [event, {**event, "event": None}], {"context": deep})
    await deliver(core, [{**event, "messageId": "m"}])
    await deliver(core, [{**event, "messageId": "m", "traits": deep}])
    kept = {"kept": [{"a": "writeKey"}]}
    assert len(core.documents) == 4
    for document in core.documents:
        assert document["properties"] == kept
        assert document["context"]["page"] == kept
        assert document["event"] == "writeKey"
    assert core.documents[1]["context"]["app"] == kept
    assert [letter.reason for letter in core.letters] == ["invalid_payload", "message_id_conflict"]
    letters = [(letter.item, letter.envelope) for letter in core.letters]
    assert "key-1" not in json.dumps(core.documents) + repr(letters)


async def test_a_transform_cannot_bring_a_write_key_back() -> None:
    def transform(event: dict[str, Any]) -> dict[str, Any]:
        return {**event, "context": {"writeKey": "key-1", "a": 1}}

    core = make_core(transforms=[("t", transform)])
    await send_event(core, {"userId": "u", "event": "e"})
    assert core.documents[0]["context"] == {"a": 1}
