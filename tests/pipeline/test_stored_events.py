# SPDX-License-Identifier: Apache-2.0
"""From the text of an item to the bytes that are stored, compared with what was stored before.

``tests/data/stored_events.json`` has random items with hostile JSON (duplicate keys, unusual
numbers, escapes), times of all forms, envelopes and missing ids, each with the event that engage
made of it before the steps were made faster. A change of what is stored is a change of this file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engage.config import DEFAULT_LIMITS
from engage.errors import ApiError
from engage.pipeline.decode import decode_json
from engage.pipeline.normalise import Arrival, Envelope, normalise
from support.each import each
from support.pipeline import NOW, SCHEMAS, limit

CASES = json.loads((Path(__file__).parents[1] / "data" / "stored_events.json").read_bytes())


def stored(case: dict[str, Any]) -> dict[str, Any]:
    """Return what becomes of the item of a case, in the form of the file."""
    envelope = case["envelope"]
    arrival = Arrival(
        workspace_id="acme",
        received_at=NOW,
        event_limit=limit(2000),
        envelope=None if envelope is None else Envelope(**envelope),
        **case["options"],
    )
    try:
        item = decode_json(case["item"].encode(), DEFAULT_LIMITS)
        assert SCHEMAS.is_valid(item["type"], item)
        event = normalise(item, item["type"], arrival, 2)
    except ApiError as error:
        return {"error": [error.code, error.message]}
    return {
        "body": event.body.decode(),
        "event": [
            *(event.message_id, event.type, event.user_id, event.anonymous_id, event.name),
            *(event.received_at, event.timestamp, event.weight),
        ],
    }


@each("number", range(len(CASES)))
def test_an_item_is_stored_as_before(number: int) -> None:
    case = CASES[number]
    expected = {name: case[name] for name in ("body", "event", "error") if name in case}
    assert stored(case) == expected
