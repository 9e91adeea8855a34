# SPDX-License-Identifier: Apache-2.0
"""The transform ``redact``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from engage.config import load
from engage.config.schema_check import SettingsError
from engage.registry import load_plugins
from support.server_process import Server, config_text

EVENT: dict[str, Any] = {
    "type": "identify",
    "userId": "ann",
    "messageId": "m",
    "ssn": "at the top",
    "traits": {"ssn": "1", "name": "Ann", "cards": [{"ssn": "2", "no": 1}, "ssn", [{"ssn": 3}]]},
    "context": {"ip": "10.0.0.1", "traits": {"ssn": {"a": 1}}, "page": {"ip": "10.0.0.2"}},
}


def redact(keys: list[str], replacement: str | None = None) -> dict[str, Any]:
    """Return the event as the transform changes it."""
    options = {"keys": keys} | ({} if replacement is None else {"replacement": replacement})
    changed = load_plugins().transforms["redact"].factory(options)(copy.deepcopy(EVENT))
    assert isinstance(changed, dict)
    return changed


def test_a_key_is_removed_at_every_depth() -> None:
    assert redact(["ssn"]) == {
        "type": "identify",
        "userId": "ann",
        "messageId": "m",
        "traits": {"name": "Ann", "cards": [{"no": 1}, "ssn", [{}]]},
        "context": {"ip": "10.0.0.1", "traits": {}, "page": {"ip": "10.0.0.2"}},
    }


def test_a_path_is_one_place_and_leads_through_lists() -> None:
    changed = redact(["context.ip", "traits.cards.no", "traits.name.first", "nothing.here"])
    assert changed["context"]["page"] == {"ip": "10.0.0.2"}
    assert "ip" not in changed["context"]
    assert changed["traits"]["cards"] == [{"ssn": "2"}, "ssn", [{"ssn": 3}]]
    assert changed["traits"]["name"] == "Ann"


def test_values_are_replaced() -> None:
    changed = redact(["ssn", "context.ip"], "***")
    assert changed["ssn"] == changed["traits"]["ssn"] == changed["context"]["ip"] == "***"
    assert changed["context"]["traits"] == {"ssn": "***"}
    assert changed["traits"]["cards"] == [{"ssn": "***", "no": 1}, "ssn", [{"ssn": "***"}]]


def test_the_fields_of_an_event_stay() -> None:
    changed = redact(["type", "userId", "messageId", "traits", "context", "name"])
    assert changed.keys() == EVENT.keys()
    assert "traits" not in changed["context"]
    assert "name" not in changed["traits"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{}", "transforms[0].options.keys: is missing"),
        ("{ keys = [] }", "transforms[0].options.keys: "),
        ('{ keys = ["a."] }', "transforms[0].options.keys[0]: must be a key, or keys with dots"),
        ('{ keys = ["a"], key = "a" }', "transforms[0].options.key: unknown key"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: str, said: str) -> None:
    path = tmp_path / "engage.toml"
    path.write_text(config_text() + f'[[transforms]]\nname = "redact"\noptions = {options}\n')
    with pytest.raises(SettingsError) as caught:
        load_plugins().check(load(path))
    assert said in str(caught.value)


def test_no_value_reaches_the_store(tmp_path: Path) -> None:
    transform = '[[transforms]]\nname = "redact"\noptions = { keys = ["ssn", "context.ip"] }\n'
    with Server(tmp_path, config_text() + transform).start() as server:
        item = {**EVENT, "messageId": "m1", "traits": {"ssn": "SECRET", "plan": "pro"}}
        batch = {"batch": [item], "context": {"ip": "SECRET", "ssn": "SECRET", "os": {"name": "x"}}}
        assert server.post("/v1/batch", batch).status_code == 200
        # A conflict: its dead letter has the event as it would be stored.
        again = {**item, "traits": {"ssn": "SECRET", "plan": "free"}}
        assert server.post("/v1/batch", {**batch, "batch": [again]}).status_code == 200
        refused = server.post("/v1/track", {**item, "userId": ""})
        assert refused.status_code == 400
        assert "SECRET" not in refused.text
        (event,) = server.export()
        assert event["traits"] == {"plan": "pro"}
        assert event["context"] == {"traits": {}, "page": {"ip": "10.0.0.2"}, "os": {"name": "x"}}
        (user,) = server.export("users")
        assert user["traits"] == {"plan": "pro"}
        letters = {one["reason"]: str(one) for one in server.export("dead-letters")}
        assert letters.keys() == {"message_id_conflict", "invalid_payload"}
        assert "SECRET" in letters["invalid_payload"], "it is kept as it was sent"
        letter = letters["message_id_conflict"]
        assert "free" in letter
        assert "SECRET" not in str([event, user, letter]) + server.log()
