# SPDX-License-Identifier: Apache-2.0
"""Traits that only server keys and webhooks may set."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from engage.config import WriteKey
from engage.keys.auth import Principal
from support.each import each
from support.pipeline import ACME, Core, deliver, make_core, send_batch, send_event

SECRET = "5e" * 16
SERVER = WriteKey(id="backend", kind="server", sha256=hashlib.sha256(SECRET.encode()).hexdigest())
WORKSPACE = dataclasses.replace(
    ACME, protected_traits=("plan", "email"), write_keys=(*ACME.write_keys, SERVER)
)
DROPPED = ("traits", "dropped")


def protected() -> Core:
    """Return a pipeline with protected traits; it must be made in the event loop."""
    return make_core(workspace=WORKSPACE)


def mark(*names: str) -> dict[str, Any]:
    return {"engage": {"droppedTraits": [*names]}}


@each(
    "operation, sent, traits, context",
    [
        ("identify", {"traits": {"plan": "pro", "a": 1}}, {"a": 1}, mark("plan")),
        ("identify", {"traits": {"plan": None}}, {}, mark("plan")),
        (
            "identify",
            {"traits": {"plan": 1}, "context": {"traits": {"email": "e", "b": 2}, "ip": "::1"}},
            {"b": 2},
            {"traits": {"b": 2}, "ip": "::1", **mark("email", "plan")},
        ),
        ("group", {"groupId": "g", "traits": {"plan": 1, "a": 1}}, {"a": 1}, mark("plan")),
        (
            "track",
            {"event": "E", "context": {"traits": {"plan": 1}}},
            None,
            {"traits": {}, **mark("plan")},
        ),
        ("page", {"traits": {"plan": 1, "a": 1}}, {"a": 1}, mark("plan")),
        # Other names, and other places, are not traits of that name.
        (
            "identify",
            {"traits": {"Plan": 1, "x": {"plan": 1}}},
            {"Plan": 1, "x": {"plan": 1}},
            None,
        ),
        ("track", {"event": "E", "properties": {"plan": 1}}, None, None),
        # A client cannot write what the server writes.
        ("track", {"event": "E", "context": mark("a") | {"b": 1}}, None, {"b": 1}),
        ("track", {"event": "E", "context": {"engage": "x"}}, None, {}),
        ("identify", {"traits": {"plan": 1, "a": 1}, "context": mark("a")}, {"a": 1}, mark("plan")),
    ],
)
async def test_what_a_public_key_sets(
    operation: str,
    sent: Mapping[str, Any],
    traits: dict[str, Any] | None,
    context: dict[str, Any] | None,
) -> None:
    """The same as a single event and in a batch, where the envelope counts."""
    core = protected()
    own = orjson.loads(orjson.dumps({"userId": "u", **sent}))
    await send_event(core, own, operation)
    await send_batch(core, [{"type": operation, **own}])
    envelope = {"context": own.pop("context", {})}
    await send_batch(core, [{"type": operation, **own}], envelope)
    assert len(core.documents) == 3
    for event in core.documents:
        assert event.get("traits") == traits
        assert event.get("context") == context
    assert core.metrics.events[DROPPED] == (3 if context and context.get("engage") else 0)
    if operation == "identify":
        assert core.metrics.events["identify", "stored"] == 3


async def test_a_server_key_sets_them() -> None:
    core = protected()
    body = {"userId": "u", "traits": {"plan": "pro"}, "context": mark("x"), "writeKey": SECRET}
    await send_event(core, body, "identify", principal=None)
    principal = Principal(WORKSPACE, SERVER)
    await send_batch(core, [{"type": "identify", **body}], principal=principal)
    for event in core.documents:
        assert (event["traits"], event["context"]) == ({"plan": "pro"}, {})
    assert core.metrics.events[DROPPED] == 0


async def test_a_webhook_sets_them() -> None:
    core = protected()
    document = {
        "type": "identify",
        "messageId": "m",
        "userId": "u",
        "traits": {"email": "a@b.co"},
    }
    await deliver(core, [document])
    (event,) = core.documents
    assert event["traits"] == {"email": "a@b.co"}


async def test_a_retry_is_a_duplicate_although_the_rule_has_changed() -> None:
    """Before and after a restart with another list; nothing is lost and no letter is made."""
    item = {"userId": "u", "messageId": "m", "traits": {"plan": "pro", "a": 1}}
    for before, after in ((ACME, WORKSPACE), (WORKSPACE, ACME)):
        core = make_core(workspace=before)
        for workspace in (before, after, after):
            core.principal = Principal(workspace, workspace.write_keys[0])
            await send_event(core, item, "identify")
        assert core.metrics.events["identify", "duplicate"] == 2
        assert core.letters == []
        core.principal = Principal(WORKSPACE, WORKSPACE.write_keys[0])
        await send_event(core, {**item, "traits": {"a": 2}}, "identify")
        assert [letter.reason for letter in core.letters] == ["message_id_conflict"]


async def test_a_transform_sees_the_event_without_them() -> None:
    seen: list[dict[str, Any]] = []

    def remember(event: dict[str, Any]) -> dict[str, Any]:
        seen.append(orjson.loads(orjson.dumps(event)))
        return event

    core = make_core(workspace=WORKSPACE, transforms=[("remember", remember)])
    await send_event(core, {"userId": "u", "traits": {"plan": 1}}, "identify")
    assert [event["traits"] for event in seen] == [{}]
    assert core.documents[0]["context"] == mark("plan")
